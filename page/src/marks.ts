// A row's mark: its verdict in a comparison, its state in a single run.
// Every mark has a word, a shape and a colour, so that no two are told apart by colour alone.

import { Table, type Column } from "./columns";

export interface Mark {
  readonly word: string;
  /** The name of its shape and of its colour (`--mark-…`). */
  readonly look: string;
  /** How bad: the worst one is what a call, a module and a pixel of the timeline show. */
  readonly weight: number;
  readonly bad: boolean;
  readonly help: string;
}

const VERDICTS: readonly Mark[] = [
  { word: "identical", look: "identical", weight: 1, bad: false, help: "the same bits" },
  { word: "rounding", look: "rounding", weight: 3, bad: false, help: "as far apart as one call's rounding makes them" },
  {
    word: "drifting",
    look: "drifting",
    weight: 4,
    bad: false,
    help: "as far apart as the rounding of many calls makes them",
  },
  { word: "diverged", look: "diverged", weight: 8, bad: true, help: "further apart than rounding can explain" },
  {
    word: "non-finite",
    look: "nonfinite",
    weight: 9,
    bad: true,
    help: "NaN or infinity where the other side has none",
  },
  { word: "shape", look: "shape", weight: 7, bad: true, help: "the shapes differ" },
  { word: "dtype", look: "dtype", weight: 6, bad: true, help: "of different kinds, such as a float and an integer" },
  { word: "only in reference", look: "reference", weight: 5, bad: false, help: "the candidate has no such tensor" },
  { word: "only in candidate", look: "candidate", weight: 5, bad: false, help: "the reference has no such tensor" },
  { word: "unknown", look: "unknown", weight: 2, bad: false, help: "nothing was kept that can be compared" },
];

const STATES: readonly Mark[] = [
  { word: "finite", look: "identical", weight: 1, bad: false, help: "no NaN and no infinity is known in it" },
  {
    word: "tight",
    look: "drifting",
    weight: 4,
    bad: false,
    help: "head-room below 16× (8-bit floats: 2×), or exactly the largest number of its dtype",
  },
  { word: "overflow near", look: "shape", weight: 7, bad: true, help: "head-room below 2×: twice as much overflows" },
  { word: "non-finite", look: "nonfinite", weight: 9, bad: true, help: "it holds NaN or infinity" },
  { word: "unknown", look: "unknown", weight: 0, bad: false, help: "its statistics were not kept" },
];

export class Marks {
  private constructor(
    readonly kinds: readonly Mark[],
    readonly codes: Uint8Array,
  ) {}

  /** Of a table of either kind. */
  static of(table: Table): Marks {
    return table.has("verdict")
      ? Marks.worded(table.column("verdict"), VERDICTS)
      : Marks.worded(table.column("state"), STATES);
  }

  private static worded(column: Column, known: readonly Mark[]): Marks {
    const none = known.find((mark) => mark.word === "unknown")!;
    const kinds = (column.words ?? []).map(
      (word) => known.find((mark) => mark.word === word) ?? { ...none, word, help: "" },
    );
    const unknown = kinds.indexOf(none);
    const all = unknown < 0 ? [...kinds, none] : kinds;
    const missing = unknown < 0 ? kinds.length : unknown;
    return new Marks(
      all,
      Uint8Array.from(column.values, (code) => (code < 0 ? missing : code)),
    );
  }

  at(row: number): Mark {
    return this.kinds[this.codes[row]!]!;
  }

  /** The worse of two codes. */
  worse(one: number, other: number): number {
    return this.kinds[other]!.weight > this.kinds[one]!.weight ? other : one;
  }

  counts(): { mark: Mark; code: number; count: number }[] {
    const counts = new Array<number>(this.kinds.length).fill(0);
    for (const code of this.codes) counts[code]!++;
    return this.kinds
      .map((mark, code) => ({ mark, code, count: counts[code]! }))
      .filter(({ count }) => count > 0)
      .sort((a, b) => b.mark.weight - a.mark.weight);
  }
}
