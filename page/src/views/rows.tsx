// The table of all rows. Only the visible rows are in the document, so that it may have millions.

import { useMemo, useRef } from "preact/hooks";
import type { Data } from "../data";
import { atRow, CLEAR, filtered, type Go, type View } from "../route";
import type { Selection } from "../selection";
import { useWidth } from "../width";
import { fitting, heads, template } from "./heads";
import { State, VirtualList } from "./panes";

const ROW = 26;
const HEAD = 28;

interface Props {
  data: Data;
  view: View;
  go: Go;
  selection: Selection;
  chosen: number;
}

export function Rows({ data, view, go, selection, chosen }: Props) {
  const { rows, counts } = selection;
  const box = useRef<HTMLDivElement>(null);
  const room = useWidth(box);
  const all = useMemo(() => heads(data, counts, view.metric), [data, counts, view.metric]);
  const columns = useMemo(() => fitting(all, room), [all, room]);
  const sortBy = (name: string) =>
    name && go({ sort: view.sort === name ? `-${name}` : view.sort === `-${name}` ? "" : name });
  const head = (
    <div class="row head" role="row">
      {columns.map((head) => (
        <div
          key={head.name}
          role="columnheader"
          class={`cell ${head.number ? "number" : ""}`}
          aria-sort={
            view.sort === head.name && head.name ? "ascending" : view.sort === `-${head.name}` ? "descending" : "none"
          }
        >
          <button type="button" title={head.help ?? `Sort by ${head.title}`} onClick={() => sortBy(head.name)}>
            {head.title}
            <span class="arrow" aria-hidden="true">
              {view.sort === head.name && head.name ? " ▲" : view.sort === `-${head.name}` ? " ▼" : ""}
            </span>
          </button>
        </div>
      ))}
    </div>
  );
  return (
    <div
      class="grid"
      role="grid"
      aria-label="Pairs"
      aria-rowcount={rows.length}
      ref={box}
      style={{ "--columns": template(columns, room) }}
    >
      {rows.length ? (
        <VirtualList
          count={rows.length}
          height={ROW}
          chosen={chosen}
          list={rows}
          begin={data.first === null ? -1 : rows.indexOf(data.first)}
          label="Rows"
          head={head}
          headHeight={HEAD}
          draw={(index, top) => {
            const row = rows[index]!;
            return (
              <div
                key={row}
                class={`row ${index === chosen ? "row-chosen" : ""} ${row === data.first ? "row-first" : ""}`}
                role="row"
                aria-rowindex={index + 1}
                aria-selected={index === chosen}
                data-row={row}
                style={{ top: `${top}px` }}
                onClick={() => go(atRow(row))}
              >
                {columns.map((head) => (
                  <div
                    key={head.name}
                    role="gridcell"
                    class={`cell ${head.number ? "number" : ""}`}
                    title={head.tip?.(row)}
                  >
                    {head.cell(row)}
                  </div>
                ))}
              </div>
            );
          }}
        />
      ) : (
        <State kind="empty" title={data.table.rows ? "No row fits these filters." : "There are no rows."}>
          {filtered(view) ? (
            <button type="button" onClick={() => go(CLEAR)}>
              Clear filters
            </button>
          ) : null}
        </State>
      )}
    </div>
  );
}
