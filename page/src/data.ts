// Everything the views share about one table, computed once when it arrives.

import { Calls } from "./calls";
import type { Table } from "./columns";
import type { Overview, Session } from "./documents";
import { layOut, type Grid } from "./grid";
import { Marks } from "./marks";
import type { Source } from "./source";
import { grow, type Tree } from "./tree";

export interface Data {
  readonly source: Source;
  readonly session: Session;
  readonly overview: Overview;
  readonly table: Table;
  readonly marks: Marks;
  readonly calls: Calls;
  readonly grid: Grid;
  readonly tree: Tree;
  readonly comparing: boolean;
  /** The row that the answer is about: of the first divergence, or of the first alarm. */
  readonly first: number | null;
}

export async function load(source: Source, session: Session): Promise<Data> {
  const [overview, table] = await Promise.all([source.overview(), source.columns()]);
  const marks = Marks.of(table);
  const calls = new Calls(table, marks);
  // An alarm is about a call; the row to go to is the first in it that is not finite.
  const alarms = (overview.alarms ?? []).map((alarm) => ({
    ...alarm,
    row: alarm.row === null ? null : calls.face(calls.of(alarm.row)),
  }));
  return {
    source,
    session,
    overview: { ...overview, alarms },
    table,
    marks,
    calls,
    grid: layOut(table, marks, calls),
    tree: grow(table, marks),
    comparing: table.has("verdict"),
    first: overview.first?.row ?? alarms[0]?.row ?? null,
  };
}
