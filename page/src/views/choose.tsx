// The form that chooses two runs to compare, with options; or one run to look at.

import { useState } from "preact/hooks";
import type { Session } from "../documents";
import type { Source } from "../source";
import { State } from "./panes";
import { nameOf, RunPick } from "./pick";

interface Field {
  readonly name: string;
  readonly label: string;
  readonly help: string;
  readonly placeholder?: string;
  /** The choices; the first is the default. */
  readonly among?: readonly string[];
}

/** The options of a comparison, by the names that the command line has for them. */
const FIELDS: readonly Field[] = [
  {
    name: "steps",
    label: "steps",
    placeholder: "all, or 0:10:2",
    help: "Which steps: the first, the end, every how many",
  },
  { name: "ranks", label: "ranks", placeholder: "all, or 0,3", help: "Which ranks, with commas between them" },
  {
    name: "sites",
    label: "sites",
    placeholder: "all, or ^h\\.2",
    help: "Only sites in which this regular expression is found",
  },
  {
    name: "tolerance",
    label: "tolerance",
    placeholder: "bfloat16=0.02",
    help: "What is still rounding: a site or a dtype, and an error",
  },
  {
    name: "by",
    label: "match by",
    among: ["auto", "key", "order"],
    help: "Calls are partners by their names, or by their order; auto: by order where one run does not tell modules",
  },
  {
    name: "micro",
    label: "micro steps",
    among: ["paired", "joined"],
    help: "Micro steps are compared one by one, or as the batch they make up",
  },
  {
    name: "shapes",
    label: "shapes",
    among: ["judged", "same", "loose"],
    help: "Tensors of different shapes are a pair that is wrong, or no pair",
  },
  { name: "offset", label: "step offset", placeholder: "0", help: "Added to the candidate's step numbers" },
];

/** The options of a run that is looked at alone. */
const ALONE = { candidate: null, noise: null, options: {} };

/** A whole number as a number; any other text as it was typed, which the server refuses. */
function whole(value: unknown): unknown {
  return /^\s*[+-]?\d+\s*$/.test(String(value)) ? Number(value) : value;
}

interface Props {
  session: Session;
  source: Source;
  onStarted: () => void;
}

export function Choose({ session, source, onStarted }: Props) {
  const { runs } = session;
  const [reference, setReference] = useState(session.reference ?? runs[0]?.id ?? "");
  const [candidate, setCandidate] = useState(
    session.candidate ?? (session.reference === null ? (runs[1]?.id ?? "") : ""),
  );
  const [noise, setNoise] = useState(session.noise ?? "");
  const [options, setOptions] = useState<Record<string, unknown>>(session.options);
  const [problem, setProblem] = useState("");
  const fixed = session.fixed ?? {};
  const running = session.job.state === "running";
  const setOption = (name: string, value: unknown) => setOptions({ ...options, [name]: value });

  const start = async (event: Event) => {
    event.preventDefault();
    setProblem("");
    const said = Object.fromEntries(
      Object.entries(options)
        .filter(([, value]) => value !== "" && value !== null && value !== false)
        .map(([name, value]) => [name, name === "offset" ? whole(value) : value]),
    );
    const pair = candidate ? { candidate, noise: noise || null, options: said } : ALONE;
    try {
      await source.compare!({ reference, ...pair });
      onStarted();
    } catch (error) {
      setProblem(error instanceof Error ? error.message : String(error));
    }
  };

  if (!runs.length) {
    return (
      <State kind="empty" title="No runs were given.">
        Start the page with them: <code>astray view RUN RUN</code>
      </State>
    );
  }
  return (
    <form class="choose" onSubmit={start} data-test="choose">
      <h1>Choose what to look at</h1>
      <div class="choose-runs">
        <RunPick
          title="reference"
          help="how it should be"
          {...{ runs, source }}
          value={reference}
          onPick={setReference}
        />
        <RunPick
          title="candidate"
          help="what is in question"
          none="none: the reference alone"
          {...{ runs, source }}
          value={candidate}
          onPick={setCandidate}
        />
      </div>
      <fieldset disabled={!candidate}>
        <legend>How they are compared</legend>
        {FIELDS.map(({ name, label, placeholder, help, among }) => (
          <label key={name} title={help}>
            <span>{label}</span>
            {among ? (
              <select
                name={name}
                value={String(options[name] ?? "")}
                onChange={(event) => setOption(name, event.currentTarget.value)}
              >
                {among.map((word, at) => (
                  <option key={word} value={at === 0 ? "" : word}>
                    {word}
                  </option>
                ))}
              </select>
            ) : (
              <input
                type="text"
                name={name}
                spellcheck={false}
                placeholder={placeholder}
                value={String(options[name] ?? "")}
                onInput={(event) => setOption(name, event.currentTarget.value)}
              />
            )}
          </label>
        ))}
        <label title="A second recording of the reference, as by astray run --perturb: its errors are not counted as errors">
          <span>noise</span>
          <select name="noise" value={noise} onChange={(event) => setNoise(event.currentTarget.value)}>
            <option value="">{fixed.noise ?? "none"}</option>
            {runs.map((run) => (
              <option key={run.id} value={run.id} title={run.path}>
                {nameOf(run, runs)}
              </option>
            ))}
          </select>
        </label>
        <label class="switch" title="Only the same bits agree">
          <input
            type="checkbox"
            name="exact"
            checked={options.exact === true}
            onChange={(event) => setOption("exact", event.currentTarget.checked)}
          />
          only the same bits agree
        </label>
      </fieldset>
      {Object.keys(fixed).length ? (
        <p class="dim wrapped">
          Given on the command line, and held to:{" "}
          {Object.entries(fixed)
            .map(([name, text]) => `${name} ${text}`)
            .join(", ")}
        </p>
      ) : null}
      {reference === candidate ? <p class="dim">Both are the same run: it will agree with itself.</p> : null}
      {problem ? (
        <p class="problem" role="alert">
          {problem}
        </p>
      ) : null}
      <button type="submit" class="primary" disabled={running || !reference}>
        {candidate ? "Compare" : "Look"}
      </button>
    </form>
  );
}
