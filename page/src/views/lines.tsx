// Lines over steps: the error and what can be explained in a comparison, the statistics of a run. A click goes to that step.

import { useEffect, useRef, useState } from "preact/hooks";
import uPlot from "uplot";
import "uplot/dist/uPlot.min.css";
import type { Data } from "../data";
import { rough, short } from "../numbers";
import { atRow, type Go } from "../route";
import { colour, useTheme } from "../theme";
import { Choice } from "./panes";

interface Curve {
  readonly name: string; // of the column
  readonly title: string;
  readonly ink: string; // a colour of the style sheet
  readonly dash?: number[];
}

const GROUPS: Record<string, readonly Curve[]> = {
  error: [
    { name: "error", title: "error", ink: "line-a" },
    { name: "deviation", title: "by the measure that is most surprising", ink: "mark-diverged", dash: [2, 3] },
    { name: "limit", title: "what can be explained by that measure", ink: "mark-rounding", dash: [6, 4] },
  ],
  size: [
    { name: "absmax", title: "max |x|", ink: "line-a" },
    { name: "std", title: "std", ink: "line-b", dash: [6, 4] },
  ],
  range: [
    { name: "max", title: "max", ink: "line-a" },
    { name: "mean", title: "mean", ink: "line-c", dash: [2, 3] },
    { name: "min", title: "min", ink: "line-b", dash: [6, 4] },
  ],
  "L2 norm": [{ name: "l2", title: "L2 norm", ink: "line-a" }],
  "head-room": [{ name: "headroom", title: "head-room (×)", ink: "line-a" }],
  zeros: [{ name: "zeros", title: "zeros", ink: "line-a" }],
};
const LOGARITHMIC = new Set(["error", "size", "L2 norm", "head-room"]);

export function OverSteps({ data, row, rows, go }: { data: Data; row: number; rows: readonly number[]; go: Go }) {
  const { table, comparing } = data;
  const groups = comparing ? ["error"] : Object.keys(GROUPS).filter((name) => name !== "error");
  const [picked, setPicked] = useState(groups[0]!);
  const group = groups.includes(picked) ? picked : groups[0]!;
  const curves = GROUPS[group]!.filter(({ name }) => table.has(name));
  if (!curves.length) return null;
  const strange = rows.filter((other) => data.marks.at(other).look === "nonfinite");
  return (
    <div class="over-steps">
      {groups.length > 1 ? (
        <Choice
          label="Statistics"
          options={groups.map((name) => [name, name] as const)}
          value={group}
          onPick={setPicked}
        />
      ) : null}
      <Chart {...{ data, rows, row, curves, go }} logarithmic={LOGARITHMIC.has(group)} />
      <div class="legend">
        {curves.map((curve) => (
          <span key={curve.name}>
            <svg class="legend-line" viewBox="0 0 22 4" aria-hidden="true">
              <line
                x1="0"
                x2="22"
                y1="2"
                y2="2"
                class={`ink-${curve.ink}`}
                stroke-width="2"
                stroke-dasharray={curve.dash?.join(" ")}
              />
            </svg>{" "}
            {curve.title}
          </span>
        ))}
        {curves[0]!.name === "error" && rows.some((other) => table.raw("error", other) === 0) ? (
          <span>no line: no error</span>
        ) : null}
        {strange.length ? (
          <span class="look-nonfinite">
            ▲ NaN or infinity at {strange.length === 1 ? "step" : "steps"}{" "}
            {strange
              .slice(0, 6)
              .map((other) => table.raw("step", other))
              .join(", ")}
            {strange.length > 6 ? " …" : ""}
          </span>
        ) : null}
      </div>
    </div>
  );
}

interface ChartProps {
  data: Data;
  rows: readonly number[];
  row: number;
  curves: readonly Curve[];
  logarithmic: boolean;
  go: Go;
}

function Chart({ data, rows, row, curves, logarithmic, go }: ChartProps) {
  const box = useRef<HTMLDivElement>(null);
  const themed = useTheme();
  useEffect(() => {
    const home = box.current!;
    const { table, marks } = data;
    const steps = rows.map((other) => table.raw("step", other));
    const known = (value: number): number | null =>
      Number.isFinite(value) && (!logarithmic || value > 0) ? value : null;
    const lines = curves.map(({ name }) => rows.map((other) => known(table.raw(name, other))));
    const any = lines.some((line) => line.some((value) => value !== null));
    const axis = {
      stroke: colour("dim"),
      grid: { stroke: colour("line"), width: 1 },
      ticks: { stroke: colour("line"), width: 1 },
      font: "11px system-ui",
    };
    const marked = (plot: uPlot): void => {
      const { ctx: pen, bbox } = plot;
      pen.save();
      for (const other of rows) {
        const x = plot.valToPos(table.raw("step", other), "x", true);
        if (other === row) {
          pen.strokeStyle = colour("accent");
          pen.lineWidth = devicePixelRatio;
          pen.strokeRect(x, bbox.top, 0, bbox.height);
        }
        if (marks.at(other).look !== "nonfinite") continue;
        const size = 5 * devicePixelRatio;
        pen.fillStyle = colour("mark-nonfinite");
        pen.beginPath();
        pen.moveTo(x, bbox.top + bbox.height - 2 * size);
        pen.lineTo(x + size, bbox.top + bbox.height);
        pen.lineTo(x - size, bbox.top + bbox.height);
        pen.fill();
      }
      pen.restore();
    };
    const chart = new uPlot(
      {
        width: home.clientWidth || 400,
        height: 150,
        legend: { show: false },
        cursor: { y: false, drag: { x: false, y: false } },
        scales: { x: { time: false }, y: logarithmic && any ? { distr: 3 } : {} },
        axes: [
          {
            ...axis,
            size: 30,
            values: (_, splits) => splits.map((value) => (Number.isInteger(value) ? String(value) : "")),
          },
          {
            ...axis,
            size: 56,
            values: (_, splits) =>
              splits.map((value) => (value === null ? "" : logarithmic ? rough(value) : short(value))),
          },
        ],
        series: [
          {},
          ...curves.map((curve) => ({
            label: curve.title,
            stroke: colour(curve.ink),
            width: 2,
            ...(curve.dash ? { dash: curve.dash } : {}),
            points: { show: rows.length < 60, size: 6 },
          })),
        ],
        hooks: { draw: [marked] },
      },
      [steps, ...lines] as uPlot.AlignedData,
      home,
    );
    const click = () => {
      const at = chart.cursor.idx;
      if (at != null && rows[at] !== undefined && rows[at] !== row) go(atRow(rows[at]));
    };
    chart.over.addEventListener("click", click);
    const observer = new ResizeObserver(() => chart.setSize({ width: home.clientWidth, height: 150 }));
    observer.observe(home);
    return () => {
      observer.disconnect();
      chart.destroy();
    };
  }, [data, rows, row, curves.map(({ name }) => name).join(" "), logarithmic, themed]);
  return <div class="chart" ref={box} data-test="lines" />;
}
