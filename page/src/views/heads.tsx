// The columns of the table: what each is called, how wide it is, and what stands in its cells.

import type { ComponentChildren } from "preact";
import type { Data } from "../data";
import { severalOf, siteOf, tensorOf } from "../names";
import { cosine, counted, rough, short } from "../numbers";
import { Verdict } from "./mark";

type Spare = 1 | 2 | 3 | 4;

export interface Head {
  /** The column that it is sorted by. */
  readonly name: string;
  readonly title: string;
  readonly help?: string;
  readonly width: string;
  readonly number?: boolean;
  /** Shown only where there is room for so many: the higher, the more is needed. */
  readonly spare?: Spare;
  readonly cell: (row: number) => ComponentChildren;
  readonly tip?: (row: number) => string;
}

/** `counts` is how many wrong rows each row stands for, if only conclusions are shown. */
export function heads({ table, marks, comparing }: Data, counts: Map<number, number> | null): Head[] {
  const several = severalOf(table);
  const numeric = (name: string, title: string, spare?: Spare, help?: string): Head => ({
    name,
    title,
    width: "68px",
    number: true,
    cell: (row) => short(table.number(name, row)),
    ...(spare ? { spare } : {}),
    ...(help ? { help } : {}),
  });
  const whole = (name: string, title: string, width: string): Head => ({
    name,
    title,
    width,
    number: true,
    cell: (row) => counted(table.raw(name, row)),
  });
  const text = (name: string, title: string, width: string, spare?: Spare): Head => ({
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
  const identity: Head[] = [
    {
      name: "verdict",
      title: comparing ? "verdict" : "state",
      width: "96px",
      tip: (row) => marks.at(row).word,
      cell: (row) => <Verdict mark={marks.at(row)} />,
    },
    whole("step", "step", "38px"),
    ...(several.micro ? [whole("micro", "micro", "50px")] : []),
    ...(several.rank ? [whole("rank", "rank", "46px")] : []),
    text("phase", "phase", "66px"),
    {
      name: "site",
      title: "site",
      width: "minmax(120px, 2fr)",
      cell: (row) => <Site data={{ table }} row={row} />,
      tip: (row) => `${siteOf(table, row)} ${table.word("type", row) ?? ""}`,
    },
    {
      name: "role",
      title: "tensor",
      width: "minmax(118px, 1fr)",
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
          width: "48px",
          number: true,
          cell: (row) => counted(counts.get(row) ?? 1),
        },
      ]
    : [];
  const forms: Head[] = [
    {
      name: `dtype${form("a")}`,
      title: "dtype",
      width: "84px",
      spare: comparing ? 2 : 3,
      cell: both("dtype"),
      tip: both("dtype"),
    },
    {
      name: `shape${form("a")}`,
      title: "shape",
      width: "96px",
      spare: comparing ? 2 : 3,
      cell: both("shape"),
      tip: both("shape"),
    },
  ];
  const measured: Head[] = comparing
    ? [
        {
          ...numeric("error", "error", undefined, "How far the two are apart, relative"),
          cell: (row) => <b>{rough(table.number("error", row))}</b>,
        },
        {
          ...numeric("limit", "limit", 1, "What rounding would stay below"),
          cell: (row) => rough(table.number("limit", row)),
        },
        {
          ...numeric("cosine", "cosine", 3),
          width: "84px",
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
      ]
    : [
        {
          ...numeric("headroom", "head-room", 1, "By which factor it could grow before its dtype ends"),
          width: "82px",
          cell: (row) => times(table.number("headroom", row)),
        },
        { ...numeric("absmax", "max |x|"), width: "78px" },
        { ...numeric("mean", "mean", 2), width: "78px" },
        { ...numeric("std", "std", 4), width: "78px" },
        { ...numeric("min", "min", 4), width: "78px" },
        { ...numeric("max", "max", 4), width: "78px" },
        { ...numeric("nan", "NaN", 2), width: "50px" },
        { ...numeric("inf", "Inf", 2), width: "50px" },
      ];
  return [
    ...identity,
    ...grouped,
    ...measured.filter((head) => table.has(head.name)),
    ...forms.filter((head) => table.has(head.name)),
  ];
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

export function spared(head: Head): string {
  return head.spare ? `spare-${head.spare}` : "";
}
