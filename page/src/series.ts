// One tensor over all steps, found in the table: the rows that differ from a row in nothing but the step.

import type { Table } from "./columns";

const KEY = ["site", "type", "kind", "call", "phase", "recompute", "micro", "rank", "role", "path"] as const;

/** The rows of the same tensor, one for each step that has it, in order of steps. */
export function overSteps(table: Table, row: number): number[] {
  const columns = KEY.flatMap((name) => table.find(name)?.values ?? []);
  const step = table.column("step").values;
  const byStep = new Map<number, number>();
  for (let other = 0; other < table.rows; other++) {
    if (columns.every((values) => values[other] === values[row])) byStep.set(step[other]!, other);
  }
  return [...byStep].sort(([a], [b]) => a - b).map(([, found]) => found);
}
