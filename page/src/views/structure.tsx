// The arguments of a call, nested as in the program; deep or long ones are folded.

import type { ComponentChildren } from "preact";
import { short } from "../numbers";

const DEEPEST = 12;

export function Structure({ value, depth = 0 }: { value: unknown; depth?: number }): ComponentChildren {
  if (typeof value === "number") return <code>{short(value)}</code>;
  if (value === null || typeof value !== "object") return <code class="wrapped">{String(value)}</code>;
  if (depth >= DEEPEST) return <span class="dim">…</span>;
  const entries = Object.entries(value);
  if (!entries.length) return <code>{Array.isArray(value) ? "()" : "{}"}</code>;
  const list = (
    <dl class="structure">
      {entries.slice(0, 100).map(([name, item]) => (
        <div key={name}>
          <dt>{name}</dt>
          <dd>
            <Structure value={item} depth={depth + 1} />
          </dd>
        </div>
      ))}
      {entries.length > 100 ? <div class="dim">and {entries.length - 100} more</div> : null}
    </dl>
  );
  return depth < 2 || entries.length < 4 ? (
    list
  ) : (
    <details>
      <summary class="dim">{entries.length} items</summary>
      {list}
    </details>
  );
}
