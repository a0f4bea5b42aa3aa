// Which rows are shown, and in what order: filters and sorting over typed arrays, in the browser.

import type { Table } from "./columns";
import type { Marks } from "./marks";
import { atLeast, badness, metricOf, type Metric } from "./metrics";
import type { View } from "./route";

export interface Selection {
  readonly rows: Uint32Array;
  /** With "conclusion only": how many wrong rows the site of each shown row has. */
  readonly counts: Map<number, number> | null;
  /** The filters that could not be parsed, as sentences. */
  readonly problem: string | null;
}

type Test = (row: number) => boolean;

export function select(table: Table, marks: Marks, view: View): Selection {
  const tests: Test[] = [];
  const metric = metricOf(table, view.metric);
  const problems: string[] = [];
  const steps = view.step ? parseSteps(view.step) : null;
  if (steps) tests.push(numbered(table, "step", steps));
  else if (view.step) problems.push(`'${view.step}' is not a step. Write 3, 2-5 or 0,4.`);
  if (view.epoch && table.has("epoch")) tests.push(numbered(table, "epoch", (epoch) => epoch === Number(view.epoch)));
  if (view.rank) tests.push(numbered(table, "rank", (rank) => rank === Number(view.rank)));
  if (view.phase) tests.push(worded(table, "phase", (word) => word === view.phase));
  if (view.site) tests.push(worded(table, "site", (word) => inside(word, view.site)));
  if (view.verdict.length) {
    const wanted = marks.kinds.map((mark) => view.verdict.includes(mark.word));
    tests.push((row) => wanted[marks.codes[row]!]!);
  }
  if (view.least) {
    const least = Number(view.least);
    if (Number.isNaN(least)) problems.push(`'${view.least}' is not a number. Write 1e-4 or 0.001.`);
    else tests.push(atLeast(table, marks, metric, least));
  }
  if (view.q.trim()) tests.push(found(table, view.q));
  if (view.conclusion) tests.push((row) => marks.at(row).bad);

  const kept = new Uint32Array(table.rows);
  let count = 0;
  for (let row = 0; row < table.rows; row++) if (tests.every((test) => test(row))) kept[count++] = row;
  const rows = kept.subarray(0, count);
  const concluded = view.conclusion ? conclude(table, marks, rows, metric) : { rows, counts: null };
  return {
    rows: sorted(table, marks, concluded.rows, view.sort),
    counts: concluded.counts,
    problem: problems[0] ?? null,
  };
}

/** "3", "2-5", "0,4,8-10" as a predicate; null if it cannot be parsed. */
export function parseSteps(text: string): ((step: number) => boolean) | null {
  const ranges = text.split(",").map((part) => /^\s*(\d+)(?:\s*[-–]\s*(\d+))?\s*$/.exec(part));
  if (ranges.some((range) => range === null)) return null;
  const bounds = ranges.map((range) => [Number(range![1]), Number(range![2] ?? range![1])] as const);
  return (step) => bounds.some(([low, high]) => low <= step && step <= high);
}

/** Whether a site is another one or inside it. */
export function inside(site: string, outer: string): boolean {
  if (outer === "<root>") return !site.startsWith("/");
  return site.startsWith(outer) && (site.length === outer.length || ".:/".includes(site[outer.length]!));
}

function numbered(table: Table, name: string, fits: (value: number) => boolean): Test {
  const { values } = table.column(name);
  return (row) => fits(values[row]!);
}

function worded(table: Table, name: string, fits: (word: string) => boolean): Test {
  const { values, words } = table.column(name);
  const wanted = (words ?? []).map(fits);
  return (row) => wanted[values[row]!] ?? false;
}

/** Rows in which every word of the query is found, in whatever column. */
function found(table: Table, query: string): Test {
  const parts = query.toLowerCase().split(/\s+/).filter(Boolean).slice(0, 30); // one bit each
  const all = (1 << parts.length) - 1;
  const columns = ["site", "type", "role", "path", "phase", "kind"].flatMap((name) => {
    const column = table.find(name);
    if (!column?.words) return [];
    const masks = Int32Array.from(column.words, (word) => {
      const lower = word.toLowerCase();
      return parts.reduce((mask, part, at) => mask | (lower.includes(part) ? 1 << at : 0), 0);
    });
    return [{ values: column.values, masks }];
  });
  return (row) => columns.reduce((mask, { values, masks }) => mask | (masks[values[row]!] ?? 0), 0) === all;
}

/** Of each site the worst row, in the order in which the sites went wrong. */
function conclude(table: Table, marks: Marks, rows: Uint32Array, metric: Metric) {
  const site = table.column("site").values;
  const error = badness(table, metric);
  const worst = new Map<number, number>();
  const bySite = new Map<number, number>();
  for (const row of rows) {
    const code = site[row]!;
    const held = worst.get(code);
    bySite.set(code, (bySite.get(code) ?? 0) + 1);
    if (held === undefined || worseThan(row, held)) worst.set(code, row);
  }
  function size(row: number): number {
    const found = error(row);
    return Number.isNaN(found) ? -1 : found;
  }
  function worseThan(row: number, held: number): boolean {
    const gap = marks.at(row).weight - marks.at(held).weight;
    return gap > 0 || (gap === 0 && size(row) > size(held));
  }
  const counts = new Map([...worst].map(([code, row]) => [row, bySite.get(code)!]));
  return { rows: Uint32Array.from(worst.values()), counts };
}

/** Unknown values come last in either direction; ties stay in the order of execution. */
function sorted(table: Table, marks: Marks, rows: Uint32Array, sort: string): Uint32Array {
  const name = sort.replace(/^-/, "");
  const keys = sort ? sortKeys(table, marks, name) : null;
  if (!keys) return rows;
  const sign = sort.startsWith("-") ? -1 : 1;
  return rows.slice().sort((one, other) => {
    const [a, b] = [keys[one]!, keys[other]!];
    if (a === b) return one - other;
    if (Number.isNaN(a)) return Number.isNaN(b) ? one - other : 1;
    return Number.isNaN(b) ? -1 : (a - b) * sign;
  });
}

function sortKeys(table: Table, marks: Marks, name: string): ArrayLike<number> | null {
  if (name === "verdict") return Float64Array.from(marks.codes, (code) => marks.kinds[code]!.weight);
  const column = table.find(name);
  if (!column?.words) return column?.values ?? null;
  const natural = new Intl.Collator("en", { numeric: true }); // h.2 before h.10
  const order = column.words
    .map((_, code) => code)
    .sort((a, b) => natural.compare(column.words![a]!, column.words![b]!));
  const places = new Float64Array(order.length);
  order.forEach((code, place) => (places[code] = place));
  return Float64Array.from(column.values, (code) => (code < 0 ? NaN : places[code]!));
}
