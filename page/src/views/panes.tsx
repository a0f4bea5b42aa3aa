// Small components of several views: states, sections, code, lists that render only visible rows.

import type { ComponentChildren } from "preact";
import { useEffect, useLayoutEffect, useRef, useState } from "preact/hooks";
import type { Where } from "../documents";
import { atRow, type Go } from "../route";

/** The placeholder of an empty view: while loading, after a failure, without rows. */
export function State({
  kind,
  title,
  children,
}: {
  kind: "wait" | "error" | "empty";
  title: string;
  children?: ComponentChildren;
}) {
  return (
    <div class={`state state-${kind}`} role={kind === "error" ? "alert" : "status"}>
      {kind === "wait" ? <span class="spinner" /> : <span class="state-sign">{kind === "error" ? "!" : "∅"}</span>}
      <p class="state-title">{title}</p>
      {children ? <div class="state-more">{children}</div> : null}
    </div>
  );
}

export function Section({
  title,
  aside,
  children,
}: {
  title: string;
  aside?: ComponentChildren;
  children: ComponentChildren;
}) {
  return (
    <section class="section">
      <header class="section-head">
        <h3>{title}</h3>
        {aside ? <div class="section-aside">{aside}</div> : null}
      </header>
      {children}
    </section>
  );
}

/** A line of the user's program. */
export function Line({ where }: { where: Where }) {
  const name = where.file.split(/[\\/]/).pop();
  return (
    <div class="line">
      <span class="line-place" title={`${where.file}:${where.line}`}>
        {name}:{where.line}
      </span>
      <span class="line-function"> in {where.function}</span>
      {where.code ? <code class="line-code">{where.code.trim()}</code> : null}
    </div>
  );
}

/** A sentence that links to a row; plain text, if the table has no such row. */
export function Jump({ row, sentence, go }: { row: number | null; sentence: string; go: Go }) {
  if (row === null) return <span>{sentence}</span>;
  return (
    <button type="button" class="link" onClick={() => go(atRow(row))}>
      {sentence}
    </button>
  );
}

/** Makes a choice among few. */
export function Choice<T extends string>(props: {
  label: string;
  options: readonly (readonly [T, string])[];
  value: T;
  onPick: (value: T) => void;
}) {
  return (
    <div class="choice" role="group" aria-label={props.label}>
      {props.options.map(([value, text]) => (
        <button key={value} type="button" aria-pressed={value === props.value} onClick={() => props.onPick(value)}>
          {text}
        </button>
      ))}
    </div>
  );
}

// Browsers cannot lay out elements of more than some ten million pixels: for longer lists the scroll bar is scaled.
const TALLEST = 8_000_000;

interface ListProps {
  count: number;
  height: number; // of a row, in pixels
  /** The row that is scrolled into view when it changes; −1 is none. */
  chosen: number;
  /** The row that is visible at first, if none is chosen. */
  begin?: number;
  /** Identifies the list: when it changes, the list is scrolled to its top. */
  list?: unknown;
  class?: string;
  label: string;
  role?: "rowgroup" | "tree";
  /** The header, which stays at the top. */
  head?: ComponentChildren;
  headHeight?: number;
  draw: (index: number, top: number) => ComponentChildren;
}

/** A list of any length of which only the visible rows are in the document. */
export function VirtualList({
  count,
  height,
  chosen,
  begin = -1,
  list,
  label,
  role = "rowgroup",
  head,
  headHeight = 0,
  draw,
  ...rest
}: ListProps) {
  const box = useRef<HTMLDivElement>(null);
  const [seen, setSeen] = useState({ top: 0, room: 600 });
  const full = count * height;
  const tall = Math.min(full, TALLEST);
  const scale = full > tall ? (full - seen.room) / (tall - seen.room) : 1;

  useLayoutEffect(() => {
    const element = box.current!;
    const measure = () => setSeen({ top: element.scrollTop, room: element.clientHeight - headHeight });
    measure();
    const observer = new ResizeObserver(measure);
    observer.observe(element);
    element.addEventListener("scroll", measure, { passive: true });
    return () => {
      observer.disconnect();
      element.removeEventListener("scroll", measure);
    };
  }, []);

  const bring = (index: number) => {
    const element = box.current!;
    const top = (index * height) / scale;
    const seen = top >= element.scrollTop && top + height <= element.scrollTop + element.clientHeight - headHeight;
    if (index < 0 || seen) return;
    // To the middle, aligned to a row.
    const above = Math.floor((element.clientHeight - headHeight) / height / 2);
    element.scrollTop = (Math.max(0, index - above) * height) / scale;
  };
  const shown = useRef<unknown>(null);
  useEffect(() => {
    if (chosen < 0 && shown.current !== null && shown.current !== list) box.current!.scrollTop = 0;
    if (chosen < 0 && shown.current === null) bring(begin);
    shown.current = list ?? true;
  }, [list]);
  useEffect(() => {
    bring(chosen);
  }, [chosen, count]);

  const offset = seen.top * scale;
  const first = Math.max(0, Math.floor(offset / height) - 6);
  const last = Math.min(count, Math.ceil((offset + seen.room) / height) + 6);
  const shift = seen.top - offset; // where the list is longer than an element can be, rows move with the scale
  return (
    <div class={`virtual ${rest.class ?? ""}`} ref={box} role={role} aria-label={label} tabIndex={-1}>
      {head}
      <div class="virtual-all" style={{ height: `${tall}px` }}>
        {Array.from({ length: Math.max(0, last - first) }, (_, at) => draw(first + at, (first + at) * height + shift))}
      </div>
    </div>
  );
}
