// The icon of a mark: each has its own shape and colour.

import type { JSX } from "preact";
import type { Mark } from "../marks";

const LINE = { fill: "none", stroke: "currentColor", "stroke-width": 2, "stroke-linecap": "round" } as const;
const FULL = { fill: "currentColor" } as const;

const SHAPES: Record<string, JSX.Element> = {
  identical: <path d="M3 4.5h6M3 7.5h6" {...LINE} stroke-width={1.5} />,
  rounding: <path d="M2 7c1.4-2.6 2.6-2.6 4-1s2.6 1.6 4-1" {...LINE} stroke-width={1.6} />,
  drifting: <path d="M6 2.2 10 9.6H2Z" {...LINE} stroke-width={1.6} stroke-linejoin="round" />,
  diverged: <path d="m2.5 2.5 7 7m0-7-7 7" {...LINE} stroke-width={2.4} />,
  nonfinite: <path d="M6 6C4.6 2.9.9 2.9.9 6s3.7 3.1 5.1 0 5.1-3.1 5.1 0S7.4 9.1 6 6Z" {...LINE} stroke-width={1.5} />,
  shape: <path d="M2.5 2.5h7v7h-7Z" {...FULL} />,
  dtype: <path d="M6 1.5 10.5 6 6 10.5 1.5 6Z" {...FULL} />,
  reference: <path d="M6 1.8a4.2 4.2 0 0 0 0 8.4Z" {...FULL} />,
  candidate: <path d="M6 1.8a4.2 4.2 0 0 1 0 8.4Z" {...FULL} />,
  unknown: (
    <>
      <path d="M4 4.3c0-2.6 4-2.6 4 0 0 1.5-2 1.3-2 3" {...LINE} stroke-width={1.5} />
      <circle cx="6" cy="9.8" r=".95" {...FULL} />
    </>
  ),
};

export function Sign({ mark, title }: { mark: Mark; title?: string }) {
  return (
    <svg class={`sign look-${mark.look}`} viewBox="0 0 12 12" role="img" aria-label={mark.word}>
      <title>{title ?? `${mark.word}: ${mark.help}`}</title>
      {SHAPES[mark.look] ?? SHAPES.unknown}
    </svg>
  );
}

/** The icon with its word. */
export function Verdict({ mark }: { mark: Mark }) {
  return (
    <span class={`verdict look-${mark.look}`}>
      <Sign mark={mark} />
      <span>{mark.word}</span>
    </span>
  );
}
