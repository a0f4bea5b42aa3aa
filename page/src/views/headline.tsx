// The answer: what went wrong first, the evidence, and the line of the program.

import type { Data } from "../data";
import type { Suspect } from "../documents";
import { plural } from "../numbers";
import type { Go, View } from "../route";
import { Jump, Line } from "./panes";
import { SetDifferently } from "./setup";

interface Props {
  data: Data;
  view: View;
  go: Go;
}

type Tone = "good" | "partial" | "bad";

const SIGNS: Record<Tone, string> = { good: "✓", partial: "≈", bad: "✗" };

/** Whether all agrees, something is wrong, or nothing is wrong but not all could be compared. */
function toneOf({ comparing, overview }: Data): Tone {
  if (comparing) return overview.agree ? "good" : overview.first ? "bad" : "partial";
  return overview.alarms?.length ? "bad" : overview.notes?.length ? "partial" : "good";
}

export function Headline({ data, view, go }: Props) {
  const { overview } = data;
  const tone = toneOf(data);
  const open = view.place === "overview";
  return (
    <section class={`headline headline-${tone} ${open ? "" : "headline-brief"}`} data-test="headline">
      <div class="headline-answer">
        <span class="headline-sign" aria-hidden="true">
          {SIGNS[tone]}
        </span>
        <h1 title={overview.sentence}>
          <Jump row={data.first} sentence={overview.sentence} go={go} />
        </h1>
        {open ? null : (
          <button type="button" class="quiet" onClick={() => go({ place: "overview", row: null })}>
            Overview
          </button>
        )}
      </div>
      {open ? <More data={data} go={go} /> : null}
    </section>
  );
}

function More({ data, go }: { data: Data; go: Go }) {
  const { overview } = data;
  const first = overview.first ?? null;
  const alarms = overview.alarms ?? [];
  return (
    <div class="headline-more">
      <SetDifferently settings={overview.setup ?? []} go={go} />
      {first ? (
        <>
          {first.settings?.length ? (
            <dl class="around" data-test="cause">
              <dt>cause</dt>
              <dd>
                {first.settings.map((one) => (
                  <div key={one.sentence}>
                    <Jump {...one} go={go} />
                  </div>
                ))}
              </dd>
            </dl>
          ) : null}
          <div class="evidence">
            <ul>
              {[...first.evidence, first.after ?? ""].filter(Boolean).map((piece) => {
                const text = typeof piece === "string" ? piece : piece.text;
                return <li key={text}>{text}</li>;
              })}
            </ul>
            {first.where ? <Line where={first.where} /> : null}
          </div>
          <dl class="around">
            {first.before ? (
              <>
                <dt>before it</dt>
                <dd>
                  <Jump {...first.before} go={go} />
                </dd>
              </>
            ) : null}
            {first.inside?.length ? (
              <>
                <dt>inside</dt>
                <dd>{first.inside.join(" › ")}</dd>
              </>
            ) : null}
            {first.also.length ? (
              <>
                <dt>also</dt>
                <dd>
                  {first.also.slice(0, 5).map((other, at) => (
                    <div key={at}>
                      <Jump {...other} go={go} />
                    </div>
                  ))}
                  {first.also.length > 5 ? <div class="dim">and {first.also.length - 5} more</div> : null}
                </dd>
              </>
            ) : null}
          </dl>
        </>
      ) : null}
      <Suspects suspects={overview.suspects ?? []} brief={!first} go={go} />
      {alarms.length ? (
        <ol class={`alarms ${alarms.length > 1 ? "" : "alarms-one"}`}>
          {alarms.map((alarm, at) => (
            <li key={at}>
              {alarms.length > 1 ? <Jump row={alarm.row} sentence={alarm.sentence} go={go} /> : null}
              {alarm.text || alarm.advice ? <p>{[alarm.text, alarm.advice].filter(Boolean).join(" ")}</p> : null}
              {alarm.where ? <Line where={alarm.where} /> : null}
            </li>
          ))}
        </ol>
      ) : null}
      <Notes title="notes" texts={overview.notes ?? []} />
      <Notes title="problems" texts={overview.problems} />
    </div>
  );
}

/** The most surprising calls. Where nothing diverged the first of them is always shown. */
function Suspects({ suspects, brief, go }: { suspects: Suspect[]; brief: boolean; go: Go }) {
  if (!suspects.length) return null;
  const said = brief ? suspects[0]! : null;
  return (
    <>
      {said ? (
        <dl class="around">
          <dt>most surprising</dt>
          <dd>
            <Jump {...said} go={go} />
          </dd>
        </dl>
      ) : null}
      <details class="notes" data-test="suspects">
        <summary>{plural(suspects.length, "suspect")}</summary>
        <ol>
          {suspects.map((one, at) => (
            <li key={at}>
              <Jump {...one} go={go} />
            </li>
          ))}
        </ol>
      </details>
    </>
  );
}

function Notes({ title, texts }: { title: string; texts: string[] }) {
  if (!texts.length) return null;
  return (
    <details class="notes">
      <summary>{plural(texts.length, title.slice(0, -1))}</summary>
      <ul>
        {texts.map((text) => (
          <li key={text}>{text}</li>
        ))}
      </ul>
    </details>
  );
}
