// Calls: the rows that belong to one call, and the calls before and after it. A module's outputs are seen after the
// calls inside it, so the rows of a call need not be adjacent; calls are numbered in the order they begin.

import type { Table } from "./columns";
import type { Marks } from "./marks";

export class Calls {
  readonly count: number;
  /** All rows, grouped by call; and where each call begins, followed by the end of the last. */
  private readonly order: Uint32Array;
  private readonly begin: Uint32Array;
  private readonly group: ArrayLike<number>;

  constructor(
    private readonly table: Table,
    private readonly marks: Marks,
  ) {
    this.group = table.column("group").values;
    let last = -1;
    for (let row = 0; row < table.rows; row++) last = Math.max(last, this.group[row]!);
    this.count = last + 1;
    this.begin = new Uint32Array(this.count + 1);
    for (let row = 0; row < table.rows; row++) this.begin[this.group[row]! + 1]!++;
    for (let call = 0; call < this.count; call++) this.begin[call + 1]! += this.begin[call]!;
    const next = this.begin.slice();
    this.order = new Uint32Array(table.rows);
    for (let row = 0; row < table.rows; row++) this.order[next[this.group[row]!]!++] = row;
  }

  of(row: number): number {
    return this.group[row]!;
  }

  rows(call: number): Uint32Array {
    return this.order.subarray(this.begin[call]!, this.begin[call + 1]!);
  }

  first(call: number): number {
    return this.order[this.begin[call]!]!;
  }

  /** All calls in the order in which their last rows were seen. */
  byEnd(): Uint32Array {
    const last = (call: number): number => this.order[this.begin[call + 1]! - 1]!;
    return Uint32Array.from({ length: this.count }, (_, call) => call).sort((one, other) => last(one) - last(other));
  }

  /** The row that represents a call: the first wrong one, or else the first. */
  face(call: number): number {
    return this.rows(call).find((row) => this.marks.at(row).bad) ?? this.first(call);
  }

  /** The representative row of the call before or after that of a row, on the same rank, also in another step. */
  neighbour(row: number, direction: -1 | 1): number | null {
    const rank = this.table.raw("rank", row);
    const call = this.of(row) + direction;
    if (call < 0 || call >= this.count || this.table.raw("rank", this.first(call)) !== rank) return null;
    return this.face(call);
  }
}
