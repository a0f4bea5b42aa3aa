// A run in the form, with its facts.

import { useEffect, useState } from "preact/hooks";
import type { RunFacts } from "../documents";
import { plural } from "../numbers";
import type { Source } from "../source";

interface RunPickProps {
  title: string;
  help: string;
  none?: string;
  runs: readonly RunFacts[];
  source: Source;
  value: string;
  onPick: (id: string) => void;
}

/** The label of a run: its folder's name, or its path where several have that name. */
export function nameOf({ label, path }: RunFacts, runs: readonly RunFacts[]): string {
  return runs.filter((other) => other.label === label).length > 1 ? path : label;
}

export function RunPick({ title, help, none, runs, source, value, onPick }: RunPickProps) {
  const [read, setRead] = useState<Record<string, RunFacts>>({});
  const listed = runs.find(({ id }) => id === value);
  const run = read[value] ?? listed;
  useEffect(() => {
    if (!listed || listed.open !== false || read[value]) return;
    source.run?.(value).then(
      (found) => setRead((held) => ({ ...held, [value]: found })),
      () => undefined, // then only its path is shown
    );
  }, [value]);
  return (
    <div class="run-pick">
      <label>
        <span>
          {title} <span class="dim">– {help}</span>
        </span>
        <select name={title} value={value} onChange={(event) => onPick(event.currentTarget.value)}>
          {none ? <option value="">{none}</option> : null}
          {runs.map((run) => (
            <option key={run.id} value={run.id} title={run.path}>
              {nameOf(run, runs)}
            </option>
          ))}
        </select>
      </label>
      {run ? (
        <dl class="facts">
          <div>
            <dt>folder</dt>
            <dd>{run.path}</dd>
          </div>
          {run.steps.length ? (
            <div>
              <dt>holds</dt>
              <dd>{[plural(run.steps.length, "step"), plural(run.ranks.length, "rank")].join(", ")}</dd>
            </div>
          ) : null}
          {run.facts.map(([name, fact], at) => (
            <div key={at}>
              <dt>{name}</dt>
              <dd>{fact}</dd>
            </div>
          ))}
        </dl>
      ) : null}
      {run?.problems.map((text) => (
        <p key={text} class="problem">
          {text}
        </p>
      ))}
    </div>
  );
}
