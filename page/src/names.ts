// How rows, calls and tensors are called.

import type { Table } from "./columns";

/** "h.2.mlp.proj" */
export function siteOf(table: Table, row: number): string {
  return table.word("site", row) ?? "–";
}

/** Paths of what a call has only one of. */
const NAMELESS = new Set(["", "out", "grad"]);

/** "output" or "parameter weight" */
export function tensorOf(table: Table, row: number): string {
  const path = table.word("path", row) ?? "";
  const named = NAMELESS.has(path) ? "" : path;
  return [table.word("role", row) ?? "", named].filter(Boolean).join(" ") || "–";
}

/** "step 3 · micro 1 · rank 0 · forward · call 0", with only what there is more than one of */
export function placeOf(table: Table, row: number): string {
  const several = severalOf(table);
  const epoch = table.has("epoch") ? ` (epoch ${table.raw("epoch", row)}, step ${table.raw("epoch_step", row)})` : "";
  const parts = [`step ${table.raw("step", row)}${epoch}`];
  if (several.micro) parts.push(`micro step ${table.raw("micro", row)}`);
  if (several.rank) parts.push(`rank ${table.raw("rank", row)}`);
  const phase = table.word("phase", row);
  if (phase) parts.push(phase);
  const call = table.raw("call", row);
  if (call > 0) parts.push(`call ${call}`);
  if (table.raw("recompute", row) > 0) parts.push("recomputed");
  return parts.join(" · ");
}

/** Whether there is more than one micro step, and more than one rank. */
export interface Several {
  readonly micro: boolean;
  readonly rank: boolean;
}

const known = new WeakMap<Table, Several>();

export function severalOf(table: Table): Several {
  const held = known.get(table) ?? found(table);
  known.set(table, held);
  return held;
}

function found(table: Table): Several {
  const many = (name: string): boolean => {
    const values = table.find(name)?.values;
    return values !== undefined && values.length > 0 && values.some((value) => value !== values[0]);
  };
  return { micro: many("micro"), rank: many("rank") };
}

/** The different numbers of a column, in order. */
export function distinct(table: Table, name: string): number[] {
  return [...new Set(table.find(name)?.values ?? [])].sort((a, b) => a - b);
}
