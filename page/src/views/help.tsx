// The help: keys and marks.

import { useEffect, useRef } from "preact/hooks";
import type { Data } from "../data";
import { Sign } from "./mark";

const KEYS: readonly (readonly [string, string])[] = [
  ["↑ ↓", "the row above, the row below"],
  ["p n, ← →", "the previous call, the next call, across steps"],
  ["/", "search"],
  ["Esc", "close what is open, or leave a field"],
  ["?", "this"],
];

export function Help({ data, onClose }: { data: Data | null; onClose: () => void }) {
  const close = useRef<HTMLButtonElement>(null);
  useEffect(() => close.current?.focus(), []);
  return (
    <div class="veil" onClick={onClose}>
      <div
        class="dialog"
        role="dialog"
        aria-label="Help"
        aria-modal="true"
        onClick={(event) => event.stopPropagation()}
      >
        <header class="detail-title">
          <h2>Keys and marks</h2>
          <button ref={close} type="button" class="quiet close" aria-label="Close" onClick={onClose}>
            ×
          </button>
        </header>
        <dl class="facts">
          {KEYS.map(([keys, meaning]) => (
            <div key={keys}>
              <dt>
                <kbd>{keys}</kbd>
              </dt>
              <dd>{meaning}</dd>
            </div>
          ))}
        </dl>
        {data ? (
          <dl class="facts">
            {data.marks.kinds.map((mark) => (
              <div key={mark.word}>
                <dt>
                  <Sign mark={mark} /> {mark.word}
                </dt>
                <dd>{mark.help}</dd>
              </div>
            ))}
          </dl>
        ) : null}
        <p class="dim">Everything that is chosen here is in the address: copy it to send this view.</p>
      </div>
    </div>
  );
}
