// The origin and the uses of a row's tensor: the calls that made it and use it, the line of the program, the arguments
// of the call.

import type { Pair, Pointer } from "../documents";
import type { Go } from "../route";
import { Jump, Line, Section } from "./panes";
import { Structure } from "./structure";

export function Origin({ pair, go }: { pair: Pair; go: Go }) {
  const links = (title: string, found: Pointer[]) =>
    found.length ? (
      <>
        <dt>{title}</dt>
        <dd>
          {found.map((pointer) => (
            <div key={pointer.row}>
              <Jump {...pointer} go={go} />
            </div>
          ))}
        </dd>
      </>
    ) : null;
  return (
    <>
      {pair.producers.length || pair.consumers.length ? (
        <Section title="Comes from, goes to">
          <dl class="around">
            {links("made by", pair.producers)}
            {links("taken by", pair.consumers)}
          </dl>
        </Section>
      ) : null}
      {pair.source || pair.stack.length ? (
        <Section title="Source">
          {pair.source ? <Line where={pair.source} /> : null}
          {pair.stack.length > 1 ? (
            <details class="stack">
              <summary>stack of {pair.stack.length} frames</summary>
              {pair.stack.map((frame, at) =>
                typeof frame === "string" ? (
                  <div key={at} class="line">
                    {frame}
                  </div>
                ) : (
                  <Line key={at} where={{ code: null, ...frame }} />
                ),
              )}
            </details>
          ) : null}
        </Section>
      ) : null}
      {pair.args === null || pair.args === undefined ? null : (
        <Section title="Arguments">
          <Structure value={pair.args} />
        </Section>
      )}
      {pair.args_b === null || pair.args_b === undefined ? null : (
        <Section title="Arguments of the candidate">
          <Structure value={pair.args_b} />
        </Section>
      )}
    </>
  );
}
