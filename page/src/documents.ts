// The documents that the Python side makes: sent by a server, or contained in the report.

/** A number as JSON has it; what is not finite comes as "nan", "inf" or "-inf", what is not known as null. */
export type Numeric = number | string | null;

export interface RunFacts {
  id: string;
  path: string;
  label: string;
  facts: [string, string][];
  problems: string[];
  steps: number[];
  ranks: number[];
  /** Whether it was read; of others only the path is known. */
  open?: boolean;
}

export interface Job {
  state: "idle" | "running" | "done" | "stopped" | "failed";
  done: number;
  total: number;
  text: string;
}

export interface Session {
  version: string;
  mode: "live" | "file";
  kind: "comparison" | "run" | "choose";
  runs: RunFacts[];
  reference: string | null;
  candidate: string | null;
  options: Record<string, unknown>;
  /** The noise run. */
  noise?: string | null;
  /** Options of the command line that hold for every comparison. */
  fixed?: Record<string, string>;
  job: Job;
  /** Number of the shown view: another number is another table. */
  generation?: number;
}

export interface Where {
  file: string;
  line: number;
  function: string;
  code: string | null;
}

export interface Pointer {
  row: number | null;
  sentence: string;
}

export interface First {
  row: number | null;
  step: number;
  rank: number;
  micro: number;
  site: string;
  type: string | null;
  phase: string;
  call: number;
  kind: string;
  cause: string | null;
  /** How many times further off than can be explained, and how sure that makes it. */
  surprise?: Numeric;
  sureness?: string;
  /** What was set differently and explains it. */
  settings?: Pointer[];
  sentence: string;
  evidence: ({ text: string } | string)[];
  inside?: string[];
  after?: string;
  where: Where | null;
  before: Pointer | null;
  also: Pointer[];
}

export interface Alarm {
  sentence: string;
  row: number | null;
  text?: string;
  advice?: string;
  where?: Where | null;
}

/** A call that may be wrong by itself, with the row of its most surprising tensor. */
export interface Suspect extends Pointer {
  score: Numeric;
  sureness: string;
}

/** Something that was set differently in the two runs. */
export interface Setting {
  /** The first row of the site that it is about. */
  row: number | null;
  sentence: string;
  subject: string;
  name: string;
  reference: string;
  candidate: string;
  effect: "changes results" | "changes rounding" | "none known";
  kind: string;
  /** The first step in which it is so; null when it is from the start. */
  step: number | null;
  count: number;
}

export interface Overview {
  agree?: boolean;
  sentence: string;
  first?: First | null;
  counts: Record<string, number>;
  /** The calls that are most surprising, whether or not anything diverged. */
  suspects?: Suspect[];
  /** What was set differently, those first that change results. */
  setup?: Setting[];
  notes?: string[];
  problems: string[];
  alarms?: Alarm[];
}

export interface Metric {
  name: string;
  value: Numeric;
  text?: string | null;
  help?: string | null;
}

export interface Histograms {
  edges: number[];
  a: number[] | null;
  b: number[] | null;
  difference?: { edges: number[]; counts: number[] } | null;
  /** Whether counts are so different that they are drawn on a logarithmic scale. */
  log: boolean;
  /** How many elements are in no bin, by side: {"a": {"nan": 3}} */
  nonfinite?: Record<string, Record<string, number>>;
}

export interface HeatView {
  /** The axis that goes down; null where the tensor has only one. */
  rows: number | null;
  columns: number;
  shape: [number, number];
  values: Numeric[];
  pooled: [number, number];
}

export interface Heat {
  axes: { name: string; size: number }[];
  views: HeatView[];
}

export interface Frame {
  file: string;
  line: number;
  function: string;
  code?: string | null;
}

export interface Pair {
  row: number;
  key?: Record<string, unknown>;
  verdict?: string | null;
  reason?: string | null;
  sentence: string;
  metrics: Metric[];
  statistics: { name: string; a: Numeric; b?: Numeric }[];
  histograms: Histograms | null;
  worst: { index: number[]; a: Numeric; b: Numeric; difference: Numeric }[];
  heat: Heat | null;
  source: Where | null;
  stack: (Frame | string)[];
  args: unknown;
  /** The candidate's, where they are others. */
  args_b?: unknown;
  producers: Pointer[];
  consumers: Pointer[];
  values: string;
  lacking: string | null;
}
