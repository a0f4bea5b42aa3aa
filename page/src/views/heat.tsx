// Where in the tensor the error is: the mean difference over all axes but two, on a logarithmic scale of colours.

import { useEffect, useRef, useState } from "preact/hooks";
import type { Heat, HeatView } from "../documents";
import { rough } from "../numbers";
import { colour, useTheme } from "../theme";
import { Choice } from "./panes";
import { mixed, RAMP_CSS } from "../ramp";

const [WIDTH, TALLEST] = [384, 220];

export function HeatMap({ heat, of }: { heat: Heat; of: string }) {
  const [picked, setPicked] = useState("0");
  const view = heat.views[Number(picked)] ?? heat.views[0]!;
  const nameOf = (axis: number | null) => (axis === null ? "1" : `axis ${heat.axes[axis]!.name}`);
  return (
    <div class="heat">
      {heat.views.length > 1 ? (
        <Choice
          label="Axes"
          options={heat.views.map(
            ({ rows, columns }, at) => [String(at), `${nameOf(rows)} × ${nameOf(columns)}`] as const,
          )}
          value={picked}
          onPick={setPicked}
        />
      ) : null}
      <Map {...{ view, heat, of }} />
    </div>
  );
}

function Map({ view, heat, of }: { view: HeatView; heat: Heat; of: string }) {
  const canvas = useRef<HTMLCanvasElement>(null);
  const themed = useTheme();
  const [tip, setTip] = useState<string | null>(null);
  const [lines, columns] = view.shape;
  const values = view.values.map((value) => (value === "inf" ? Infinity : typeof value === "number" ? value : null));
  const finite = values.filter((value): value is number => value !== null && Number.isFinite(value));
  const high = Math.max(...finite, -300);
  const low = Math.max(Math.min(...finite, high), high - 6); // six decades are enough to see where it is

  useEffect(() => {
    const element = canvas.current!;
    [element.width, element.height] = [columns, lines];
    const pen = element.getContext("2d")!;
    const image = pen.createImageData(columns, lines);
    const nothing = channels(colour("sunk"));
    values.forEach((value, at) => {
      const ink =
        value === null
          ? nothing
          : value === Infinity
            ? [176, 48, 108]
            : mixed(high > low ? (value - low) / (high - low) : 1);
      image.data.set([...ink, 255], at * 4);
    });
    pen.putImageData(image, 0, 0);
  }, [view, themed]);

  const cell = Math.max(1, Math.min(WIDTH / columns, TALLEST / lines, 24));
  const point = (event: MouseEvent) => {
    const box = canvas.current!.getBoundingClientRect();
    const column = Math.min(columns - 1, Math.floor(((event.clientX - box.left) / box.width) * columns));
    const line = Math.min(lines - 1, Math.floor(((event.clientY - box.top) / box.height) * lines));
    const value = values[line * columns + column] ?? null;
    const down =
      view.rows === null
        ? ""
        : `axis ${heat.axes[view.rows]!.name}: ${span(line, view.pooled[0], heat.axes[view.rows]!.size)}, `;
    const across = `axis ${heat.axes[view.columns]!.name}: ${span(column, view.pooled[1], heat.axes[view.columns]!.size)}`;
    setTip(
      `${down}${across} – ${value === null ? "nothing but zeros" : value === Infinity ? "not finite" : `mean ${of} ${rough(10 ** value)}`}`,
    );
  };
  return (
    <figure>
      <canvas
        ref={canvas}
        class="heat-map"
        data-test="heat"
        style={{ width: `${Math.max(cell * columns, 40)}px`, height: `${Math.max(cell * lines, 12)}px` }}
        onMouseMove={point}
        onMouseLeave={() => setTip(null)}
      />
      <figcaption>
        {finite.length ? (
          <span class="scale">
            <span>{rough(10 ** low)}</span>
            <span class="scale-bar" style={{ background: RAMP_CSS }} />
            <span>{rough(10 ** high)}</span>
          </span>
        ) : null}
        {values.includes(Infinity) ? <span class="look-nonfinite">plain red: not finite</span> : null}
        <span class="dim">
          {tip ??
            `mean ${of}; ${view.rows === null ? "one axis" : `down axis ${heat.axes[view.rows]!.name} (${heat.axes[view.rows]!.size})`}, across axis ${heat.axes[view.columns]!.name} (${heat.axes[view.columns]!.size})${Math.max(...view.pooled) > 1 ? `, ${view.pooled.join(" × ")} elements to a cell` : ""}`}
        </span>
      </figcaption>
    </figure>
  );
}

function span(cell: number, pooled: number, size: number): string {
  const [from, to] = [cell * pooled, Math.min(size, (cell + 1) * pooled) - 1];
  return from === to ? String(from) : `${from}–${to}`;
}

function channels(hex: string): [number, number, number] {
  const digits = /^#([0-9a-f]{6})$/i.exec(hex)?.[1];
  if (!digits) return [128, 128, 128];
  return [0, 2, 4].map((at) => parseInt(digits.slice(at, at + 2), 16)) as [number, number, number];
}
