// How many rows have which mark: the legend of the timeline, and a filter. A click shows only those rows.

import type { Data } from "../data";
import { counted } from "../numbers";
import type { Go, View } from "../route";
import { Sign } from "./mark";

export function Counts({ data, view, go }: { data: Data; view: View; go: Go }) {
  const { marks } = data;
  const toggle = (word: string) =>
    go({
      verdict: view.verdict.includes(word) ? view.verdict.filter((other) => other !== word) : [...view.verdict, word],
    });
  return (
    <div class="counts" role="group" aria-label="Filter by verdict">
      {marks.counts().map(({ mark, count }) => (
        <button
          key={mark.word}
          type="button"
          class={`chip look-${mark.look}`}
          title={`${mark.word}: ${mark.help}`}
          aria-pressed={view.verdict.includes(mark.word)}
          data-verdict={mark.word}
          onClick={() => toggle(mark.word)}
        >
          <Sign mark={mark} />
          <span class="chip-word">{mark.word}</span>
          <span class="chip-count">{counted(count)}</span>
        </button>
      ))}
    </div>
  );
}
