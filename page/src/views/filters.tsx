// The filters of the table. Every field is part of the address.

import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import type { Data } from "../data";
import { metricOf, metricsOf } from "../metrics";
import { distinct } from "../names";
import { counted } from "../numbers";
import { CLEAR, filtered, type Go, type View } from "../route";
import type { Selection } from "../selection";

interface Props {
  data: Data;
  view: View;
  go: Go;
  selection: Selection;
}

export function Filters({ data, view, go, selection }: Props) {
  const { table } = data;
  const ranks = useMemo(() => distinct(table, "rank"), [table]);
  const steps = useMemo(() => distinct(table, "step"), [table]);
  const phases = table.find("phase")?.words ?? [];
  const epochs = useMemo(() => distinct(table, "epoch"), [table]);
  const metrics = useMemo(() => metricsOf(table), [table]);
  const metric = metricOf(table, view.metric);
  return (
    <div class="filters" role="search">
      <Typed
        class="filter-search"
        id="search"
        label="Search"
        placeholder="search  ( / )"
        value={view.q}
        onChange={(q) => go({ q }, "replace")}
      />
      {epochs.length > 1 ? (
        <Pick label="epoch" value={view.epoch} options={epochs.map(String)} onPick={(epoch) => go({ epoch })} />
      ) : null}
      <label class="field">
        step
        <Typed
          class="filter-step"
          label="Steps"
          placeholder="all"
          value={view.step}
          list="steps"
          onChange={(step) => go({ step }, "replace")}
        />
        <datalist id="steps">
          {steps.slice(0, 500).map((step) => (
            <option key={step} value={String(step)} />
          ))}
        </datalist>
      </label>
      {ranks.length > 1 ? (
        <Pick label="rank" value={view.rank} options={ranks.map(String)} onPick={(rank) => go({ rank })} />
      ) : null}
      {phases.length > 1 ? (
        <Pick label="phase" value={view.phase} options={phases} onPick={(phase) => go({ phase })} />
      ) : null}
      {data.comparing ? (
        <span class="field">
          <select
            class="filter-metric"
            aria-label="Metric"
            title={`${metric.title}: ${metric.help}. Rows are concluded and coloured by it.`}
            value={metric.name}
            onChange={(event) => go({ metric: event.currentTarget.value === "error" ? "" : event.currentTarget.value })}
          >
            {metrics.map(({ name, title, help }) => (
              <option key={name} value={name} title={help}>
                {title}
              </option>
            ))}
          </select>
          {metric.similarity ? "≤" : "≥"}
          <Typed
            class="filter-least"
            label="Least error"
            placeholder={metric.similarity ? "1" : "0"}
            value={view.least}
            onChange={(least) => go({ least }, "replace")}
          />
        </span>
      ) : null}
      {view.site ? (
        <button
          type="button"
          class="chip chip-site"
          title={`Only ${view.site} and what is inside. Click to show all.`}
          onClick={() => go({ site: "" })}
        >
          in <bdi>{view.site}</bdi> <span aria-hidden="true">×</span>
        </button>
      ) : null}
      {filtered(view) ? (
        <button type="button" class="quiet clear" onClick={() => go(CLEAR)}>
          clear
        </button>
      ) : null}
      <span class="grow" />
      <label class="switch" title="One line for each site that is wrong: its worst tensor">
        <input
          type="checkbox"
          checked={view.conclusion}
          onChange={(event) => go({ conclusion: event.currentTarget.checked })}
        />
        conclusion only
      </label>
      <span class="filter-count" data-test="count" role="status">
        {selection.problem ? (
          <span class="problem">{selection.problem}</span>
        ) : (
          `${counted(selection.rows.length)} of ${counted(table.rows)}`
        )}
      </span>
    </div>
  );
}

function Pick(props: { label: string; value: string; options: readonly string[]; onPick: (value: string) => void }) {
  return (
    <label class="field">
      {props.label}
      <select value={props.value} onChange={(event) => props.onPick(event.currentTarget.value)}>
        <option value="">all</option>
        {props.options.map((option) => (
          <option key={option} value={option}>
            {option}
          </option>
        ))}
      </select>
    </label>
  );
}

interface TypedProps {
  id?: string;
  class: string;
  label: string;
  placeholder: string;
  value: string;
  list?: string;
  onChange: (value: string) => void;
}

/** A debounced text field: filtering 200,000 rows at every letter would stutter. */
function Typed({ value, onChange, label, ...rest }: TypedProps) {
  const [text, setText] = useState(value);
  const waiting = useRef(0);
  const applied = useRef(value);
  // The reported text comes back as the value, perhaps after more was typed: only a different value replaces it.
  useEffect(() => {
    if (value === applied.current) return;
    clearTimeout(waiting.current);
    applied.current = value;
    setText(value);
  }, [value]);
  useEffect(() => () => clearTimeout(waiting.current), []);
  const apply = (next: string) => {
    clearTimeout(waiting.current);
    applied.current = next.trim();
    onChange(applied.current);
  };
  return (
    <input
      {...rest}
      type="text"
      spellcheck={false}
      autocomplete="off"
      aria-label={label}
      value={text}
      onInput={(event) => {
        const next = event.currentTarget.value;
        setText(next);
        clearTimeout(waiting.current);
        waiting.current = window.setTimeout(() => apply(next), 120);
      }}
      onKeyDown={(event) => event.key === "Enter" && apply(event.currentTarget.value)}
    />
  );
}
