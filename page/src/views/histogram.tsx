// Histograms of both sides over each other, and of their difference. Drawn as paths, so that colours follow the theme.

import type { Histograms } from "../documents";
import { counted, short } from "../numbers";

const [WIDTH, HEIGHT] = [400, 90];

const SIDES: Record<string, string> = { a: "reference", b: "candidate" };

interface Shape {
  readonly look: "reference" | "candidate" | "difference";
  readonly counts: readonly number[];
}

export function HistogramsOf({ histograms }: { histograms: Histograms }) {
  const { a, b, difference, edges, log } = histograms;
  const shapes: Shape[] = [];
  if (a) shapes.push({ look: "reference", counts: a });
  if (b) shapes.push({ look: "candidate", counts: b });
  const both = Boolean(a && b);
  return (
    <div class="histograms">
      <Plot title="values" {...{ edges, shapes, log }} legend={both} />
      {difference ? (
        <Plot
          title="candidate − reference"
          edges={difference.edges}
          shapes={[{ look: "difference", counts: difference.counts }]}
          log={log}
          legend={false}
        />
      ) : null}
      {Object.entries(histograms.nonfinite ?? {}).map(([side, kinds]) => {
        const counts = Object.entries(kinds).map(([kind, count]) => `${counted(count)} ${short(kind)}`);
        return counts.length ? (
          <p key={side} class="dim">{`${both ? `${SIDES[side] ?? side}: ` : ""}${counts.join(", ")} in no bin`}</p>
        ) : null;
      })}
    </div>
  );
}

function Plot(props: {
  title: string;
  edges: readonly number[];
  shapes: readonly Shape[];
  log: boolean;
  legend: boolean;
}) {
  const { title, edges, shapes, log, legend } = props;
  const most = Math.max(1, ...shapes.flatMap(({ counts }) => counts));
  const height = (count: number) => (log ? Math.log1p(count) / Math.log1p(most) : count / most);
  const zero = edges[0]! < 0 && edges.at(-1)! > 0 ? (-edges[0]! / (edges.at(-1)! - edges[0]!)) * WIDTH : null;
  return (
    <figure class="histogram">
      <figcaption>
        <span>{title}</span>
        {legend ? (
          <span class="legend">
            <i class="swatch swatch-reference" /> reference <i class="swatch swatch-candidate" /> candidate
          </span>
        ) : null}
        <span class="dim">{`tallest ${counted(most)}${log ? ", log scale" : ""}`}</span>
      </figcaption>
      <svg viewBox={`0 0 ${WIDTH} ${HEIGHT}`} preserveAspectRatio="none" role="img" aria-label={`Histogram: ${title}`}>
        {zero === null ? null : <line class="histogram-zero" x1={zero} x2={zero} y1="0" y2={HEIGHT} />}
        {shapes.map(({ look, counts }) => (
          <path key={look} class={`bars bars-${look}`} d={outline(counts, edges, height)} />
        ))}
      </svg>
      <div class="axis">
        <span>{short(edges[0])}</span>
        <span>{short((edges[0]! + edges.at(-1)!) / 2)}</span>
        <span>{short(edges.at(-1))}</span>
      </div>
    </figure>
  );
}

function outline(counts: readonly number[], edges: readonly number[], height: (count: number) => number): string {
  const [low, high] = [edges[0]!, edges.at(-1)!];
  const x = (edge: number) => (((edge - low) / (high - low || 1)) * WIDTH).toFixed(2);
  const y = (count: number) => (HEIGHT - height(count) * (HEIGHT - 4)).toFixed(2);
  const steps = counts.map((count, at) => `V${y(count)}H${x(edges[at + 1]!)}`).join("");
  return `M${x(low)} ${HEIGHT}${steps}V${HEIGHT}Z`;
}
