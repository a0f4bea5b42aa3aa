// Error over execution order: steps downwards, calls to the right. A tooltip names the call, a click goes there.

import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import type { Data } from "../data";
import { errorsOf } from "../grid";
import { metricOf, type Metric } from "../metrics";
import { placeOf, siteOf, tensorOf } from "../names";
import { counted, plural, rough } from "../numbers";
import { atRow, type Go, type View } from "../route";
import type { Selection } from "../selection";
import { Strip } from "../strip";
import { useTheme } from "../theme";
import { useWidth } from "../width";
import { Counts } from "./counts";
import { Choice } from "./panes";
import { RAMP_CSS } from "../ramp";

interface Props {
  data: Data;
  view: View;
  go: Go;
  selection: Selection;
}

interface Hover {
  readonly call: number;
  readonly x: number;
  readonly y: number;
}

export function Timeline({ data, view, go, selection }: Props) {
  const { grid, table, calls } = data;
  const canvas = useRef<HTMLCanvasElement>(null);
  const box = useRef<HTMLDivElement>(null);
  const width = useWidth(box);
  const [hover, setHover] = useState<Hover | null>(null);
  const themed = useTheme();
  const metric = metricOf(table, view.metric);
  const off = useMemo(() => errorsOf(table, calls, metric), [data, metric.name]);
  const strip = useMemo(() => new Strip(data, width, off), [data, width, off]);
  const shown = useMemo(() => callsIn(selection, data), [selection, data]);
  const row = view.row !== null && view.row < table.rows ? view.row : null;

  useEffect(() => {
    const element = canvas.current!;
    const ratio = devicePixelRatio || 1;
    element.width = Math.round(strip.width * ratio);
    element.height = Math.round(strip.height * ratio);
    const pen = element.getContext("2d")!;
    pen.scale(ratio, ratio);
    if (strip.width > 0) strip.paint(pen, { colour: view.colour, row, shown });
  }, [strip, themed, view.colour, row, shown]);

  const pointed = (event: MouseEvent): Hover | null => {
    const box = canvas.current!.getBoundingClientRect();
    const [x, y] = [event.clientX - box.left, event.clientY - box.top];
    const call = strip.callAt(x, y);
    return call === null ? null : { call, x, y };
  };

  return (
    <section class="timeline" aria-label="Timeline">
      <header class="bar">
        <h2
          title={`${counted(grid.slots)} calls to the right in order of execution, ${plural(grid.lanes.length, "step")} down`}
        >
          Timeline
        </h2>
        <Counts {...{ data, view, go }} />
        <span class="grow" />
        {data.comparing ? (
          <Choice
            label="Colours"
            options={[
              ["verdict", "verdict"],
              ["error", `log ${metric.similarity ? `1 − ${metric.title}` : metric.title}`],
            ]}
            value={view.colour}
            onPick={(colour) => go({ colour }, "replace")}
          />
        ) : null}
        {view.colour === "error" && data.comparing ? <Scale {...strip.errors} /> : null}
      </header>
      <div class="timeline-box" ref={box}>
        <canvas
          ref={canvas}
          data-test="timeline"
          style={{ width: "100%", height: `${strip.height}px` }}
          onMouseMove={(event) => setHover(pointed(event))}
          onMouseLeave={() => setHover(null)}
          onClick={(event) => {
            const found = pointed(event);
            if (found) go(atRow(calls.face(found.call)));
          }}
        />
        {hover ? <Tip {...{ data, hover, width, metric }} /> : null}
      </div>
    </section>
  );
}

function Tip({ data, hover, width, metric }: { data: Data; hover: Hover; width: number; metric: Metric }) {
  const { table, marks, calls } = data;
  const row = calls.face(hover.call);
  const left = Math.min(hover.x + 12, Math.max(0, width - 330));
  return (
    <div class="tip" style={{ left: `${left}px`, top: `${hover.y + 16}px` }}>
      <b>
        <bdi>{siteOf(table, row)}</bdi>
      </b>{" "}
      {table.word("type", row) ?? ""}
      <br />
      {placeOf(table, row)} · {tensorOf(table, row)}
      <br />
      <span class={`look-${marks.at(row).look}`}>{marks.at(row).word}</span>
      {data.comparing ? ` · ${metric.title} ${rough(table.number(metric.name, row))}` : ""}
    </div>
  );
}

function Scale({ low, high }: { low: number; high: number }) {
  return (
    <span class="scale">
      <span>1e{low}</span>
      <span class="scale-bar" style={{ background: RAMP_CSS }} />
      <span>1e{high}</span>
    </span>
  );
}

/** Which calls have a row in the table as it is filtered; null if all have, or if each row represents many. */
function callsIn(selection: Selection, data: Data): Uint8Array | null {
  if (selection.rows.length === data.table.rows || selection.counts) return null;
  const shown = new Uint8Array(data.calls.count);
  for (const row of selection.rows) shown[data.calls.of(row)] = 1;
  return shown;
}
