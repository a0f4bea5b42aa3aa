// The columns of the table: their names, widths and cells.

import type { ComponentChildren } from "preact";
import type { Data } from "../data";
import { metricOf, metricsOf } from "../metrics";
import { severalOf, siteOf, tensorOf } from "../names";
import { cosine, counted, rough, short, surprise } from "../numbers";
import { Verdict } from "./mark";

type Spare = 1 | 2 | 3 | 4;

export interface Head {
  /** The column that it is sorted by. */
  readonly name: string;
  readonly title: string;
  readonly help?: string;
  /** In pixels. */
  readonly width: number;
  /** Its share of the remaining width; where there is too little, it shrinks. */
  readonly share?: number;
  /** It may be as wide as this. */
  readonly most?: number;
  readonly number?: boolean;
  /** Left out where there is no room for it: the highest first. */
  readonly spare?: Spare;
  readonly cell: (row: number) => ComponentChildren;
  readonly tip?: (row: number) => string;
}

/** `counts`: how many wrong rows each row represents, if only conclusions are shown; `metric`: the chosen metric. */
export function heads({ table, marks, comparing }: Data, counts: Map<number, number> | null, metric: string): Head[] {
  const several = severalOf(table);
  const chosen = metricOf(table, metric);
  const numeric = (name: string, title: string, spare?: Spare, help?: string): Head => ({
    name,
    title,
    width: 68,
    number: true,
    cell: (row) => short(table.number(name, row)),
    ...(spare ? { spare } : {}),
    ...(help ? { help } : {}),
  });
  const whole = (name: string, title: string, width: number): Head => ({
    name,
    title,
    width,
    number: true,
    cell: (row) => counted(table.raw(name, row)),
  });
  const text = (name: string, title: string, width: number, spare?: Spare): Head => ({
    name,
    title,
    width,
    cell: (row) => table.word(name, row) ?? "",
    ...(spare ? { spare } : {}),
  });
  const form = (side: string): string => (comparing ? `_${side}` : "");
  const both = (name: string) => (row: number) => {
    const [a, b] = [table.word(name + form("a"), row), comparing ? table.word(`${name}_b`, row) : null];
    return a === b || b === null ? (a ?? "") : a === null ? b : `${a} → ${b}`;
  };
  const label = (row: number): string => `${table.raw("epoch", row)}/${table.raw("epoch_step", row)}`;
  const identity: Head[] = [
    {
      name: "verdict",
      title: comparing ? "verdict" : "state",
      width: 96,
      most: Math.max(96, ...marks.counts().map(({ mark }) => 30 + 7 * mark.word.length)),
      tip: (row) => marks.at(row).word,
      cell: (row) => <Verdict mark={marks.at(row)} />,
    },
    ...(table.has("epoch")
      ? [{ ...whole("epoch", "epoch", 50), help: "The epoch, and the step in it", cell: label }]
      : []),
    whole("step", "step", 38),
    ...(several.micro ? [whole("micro", "micro", 50)] : []),
    ...(several.rank ? [whole("rank", "rank", 46)] : []),
    text("phase", "phase", 66, several.micro && several.rank ? 1 : undefined),
    {
      name: "site",
      title: "site",
      width: 120,
      share: 2,
      cell: (row) => <Site data={{ table }} row={row} />,
      tip: (row) => `${siteOf(table, row)} ${table.word("type", row) ?? ""}`,
    },
    {
      name: "role",
      title: "tensor",
      width: 118,
      share: 1,
      cell: (row) => tensorOf(table, row),
      tip: (row) => tensorOf(table, row),
    },
  ];
  const grouped: Head[] = counts
    ? [
        {
          name: "",
          title: "rows",
          help: "How many rows of this site are wrong",
          width: 48,
          number: true,
          cell: (row) => counted(counts.get(row) ?? 1),
        },
      ]
    : [];
  const forms: Head[] = [
    {
      name: `dtype${form("a")}`,
      title: "dtype",
      width: 84,
      spare: comparing ? 2 : 3,
      cell: both("dtype"),
      tip: both("dtype"),
    },
    {
      name: `shape${form("a")}`,
      title: "shape",
      width: 96,
      spare: comparing ? 2 : 3,
      cell: both("shape"),
      tip: both("shape"),
    },
  ];
  const measured: Head[] = comparing
    ? [
        {
          ...numeric("error", "error", chosen.name === "error" ? undefined : 1, "How far the two are apart, relative"),
          cell: (row) => rough(table.number("error", row)),
        },
        {
          ...numeric("surprise", "surprise", 1, "How many times further off than can be explained; above 1 is wrong"),
          width: 70,
          cell: (row) => surprise(table.number("surprise", row)),
        },
        {
          ...numeric("cosine", "cosine", 3),
          width: 84,
          cell: (row) => {
            const value = table.number("cosine", row);
            return value === null ? "–" : cosine(value);
          },
        },
        {
          ...numeric("max_abs", "max |Δ|", 1, "The largest difference of two elements"),
          cell: (row) => rough(table.number("max_abs", row)),
        },
        { ...numeric("relative_l2", "rel. L2", 3), cell: (row) => rough(table.number("relative_l2", row)) },
        ...metricsOf(table)
          .filter(({ name }) => !SHOWN.includes(name))
          .map(({ name, title, help }) => ({
            ...numeric(name, title, 4, help),
            cell: (row: number) => rough(table.number(name, row)),
          })),
        text("measure", "measure", 70, 4),
        {
          ...numeric("deviation", "off by", 4, "How far off it is by that measure"),
          cell: (row) => rough(table.number("deviation", row)),
        },
        {
          ...numeric("limit", "limit", 4, "How far off it may be by that measure"),
          cell: (row) => rough(table.number("limit", row)),
        },
        {
          ...numeric("given", "given", 4, "How far off what it came from is by that measure"),
          cell: (row) => rough(table.number("given", row)),
        },
        text("rule", "rule", 84, 4),
      ]
    : [
        {
          ...numeric("headroom", "head-room", 1, "By which factor it could grow before its dtype ends"),
          width: 82,
          cell: (row) => times(table.number("headroom", row)),
        },
        { ...numeric("absmax", "max |x|"), width: 78 },
        { ...numeric("mean", "mean", 2), width: 78 },
        { ...numeric("std", "std", 4), width: 78 },
        { ...numeric("min", "min", 4), width: 78 },
        { ...numeric("max", "max", 4), width: 78 },
        { ...numeric("nan", "NaN", 2), width: 50 },
        { ...numeric("inf", "Inf", 2), width: 50 },
      ];
  return [
    ...identity,
    ...grouped,
    ...chosenFirst(
      measured.filter((head) => table.has(head.name)),
      chosen.name,
    ),
    ...forms.filter((head) => table.has(head.name)),
  ];
}

/** Metrics that have a column of their own below. */
const SHOWN = ["error", "cosine", "max_abs", "relative_l2"];

/** The chosen metric comes first, is highlighted, and is never left out. */
function chosenFirst(columns: readonly Head[], name: string): Head[] {
  const chosen = columns.find((head) => head.name === name);
  if (!chosen) return [...columns];
  const { spare: _, ...kept } = chosen;
  return [{ ...kept, cell: (row) => <b>{chosen.cell(row)}</b> }, ...columns.filter((head) => head !== chosen)];
}

function times(value: number | null): string {
  if (value === null) return "–";
  return value >= 1000 ? `2^${Math.round(Math.log2(value))}×` : `${short(value)}×`;
}

function Site({ data, row }: { data: Pick<Data, "table">; row: number }) {
  const call = data.table.raw("call", row);
  return (
    <>
      <bdi>{siteOf(data.table, row)}</bdi>
      <span class="dim">
        {" "}
        {data.table.word("type", row) ?? ""}
        {call > 0 ? ` · call ${call}` : ""}
      </span>
    </>
  );
}

const [GAP, EDGES, BAR] = [12, 16, 15]; // pixels: between columns, beside them, and for a scroll bar
const NARROWEST = 64; // least width of a column that shrinks

/** The columns that there is room for. */
export function fitting(columns: readonly Head[], room: number): Head[] {
  for (const level of [4, 3, 2, 1]) {
    const some = columns.filter(({ spare }) => (spare ?? 0) <= level);
    if (needed(some) <= room) return some;
  }
  return columns.filter(({ spare }) => spare === undefined);
}

/** Column widths of the grid: surplus and lack of width are shared. */
export function template(columns: readonly Head[], room: number): string {
  const tight = needed(columns) > room;
  return columns
    .map(({ width, share, most }) => {
      if (share) return tight ? `minmax(${NARROWEST}px, ${width}fr)` : `minmax(${width}px, ${share}fr)`;
      return most && most > width ? `minmax(${width}px, ${most}px)` : `${width}px`;
    })
    .join(" ");
}

function needed(columns: readonly Head[]): number {
  return columns.reduce((sum, { width }) => sum + width + GAP, EDGES + BAR - GAP);
}
