// The modules, each with the worst mark of what is inside; foldable, searchable; a click filters the table.

import { useEffect, useMemo, useState } from "preact/hooks";
import type { Data } from "../data";
import { counted, plural } from "../numbers";
import type { Go, View } from "../route";
import { lineage, visible, type Node } from "../tree";
import { Sign } from "./mark";
import { State, VirtualList } from "./panes";

const ROW = 24;
const SMALL = 60; // a tree of no more nodes is shown unfolded

interface Props {
  data: Data;
  view: View;
  go: Go;
}

export function ModuleTree({ data, view, go }: Props) {
  const { tree, table } = data;
  const [query, setQuery] = useState("");
  const [open, setOpen] = useState<ReadonlySet<string>>(() => opened(data));
  const current = view.row !== null && view.row < table.rows ? (table.word("site", view.row) ?? "") : view.site;

  // The site shown elsewhere is unfolded here.
  useEffect(() => {
    if (current) setOpen((held) => new Set([...held, ...lineage(tree, current).slice(1)]));
  }, [current, tree]);

  const nodes = useMemo(() => visible(tree, open, query), [tree, open, query]);
  const chosen = nodes.findIndex((node) => node.path === current);
  const toggle = (node: Node) =>
    setOpen((held) => {
      const next = new Set(held);
      if (!next.delete(node.path)) next.add(node.path);
      return next;
    });

  return (
    <aside class="tree" aria-label="Modules">
      <header class="bar">
        <h2>Modules</h2>
        <input
          type="search"
          placeholder="find a module"
          aria-label="Find a module"
          value={query}
          onInput={(event) => setQuery(event.currentTarget.value)}
        />
      </header>
      {nodes.length ? (
        <VirtualList
          count={nodes.length}
          height={ROW}
          chosen={chosen}
          label="Modules"
          role="tree"
          draw={(index, top) => {
            const node = nodes[index]!;
            return <Branch key={node.path} {...{ data, view, go, node, top, current, query, open, toggle }} />;
          }}
        />
      ) : (
        <State kind="empty" title={query ? `No module has '${query}' in its name.` : "There are no modules."} />
      )}
    </aside>
  );
}

interface BranchProps extends Props {
  node: Node;
  top: number;
  current: string;
  query: string;
  open: ReadonlySet<string>;
  toggle: (node: Node) => void;
}

function Branch({ data, view, go, node, top, current, query, open, toggle }: BranchProps) {
  const mark = data.marks.kinds[Math.max(0, node.worst)]!;
  const unfolded = query.trim() !== "" || open.has(node.path);
  const tooltip = `${node.path}${node.type ? ` (${node.type})` : ""}: ${plural(node.rows, "row")}, ${counted(node.bad)} wrong`;
  return (
    <div
      class={`branch ${node.path === view.site ? "branch-chosen" : ""} ${node.path === current ? "branch-current" : ""}`}
      style={{ top: `${top}px`, paddingLeft: `${6 + Math.min(node.depth, 8) * 14}px` }}
      role="treeitem"
      aria-expanded={node.children.length ? unfolded : undefined}
      aria-level={node.depth + 1}
      title={tooltip}
      data-site={node.path}
    >
      {node.children.length ? (
        <button type="button" class="fold" aria-label={unfolded ? "Fold" : "Unfold"} onClick={() => toggle(node)}>
          {unfolded ? "▾" : "▸"}
        </button>
      ) : (
        <span class="fold" />
      )}
      <Sign mark={mark} />
      <button type="button" class="branch-name" onClick={() => go({ site: view.site === node.path ? "" : node.path })}>
        <bdi>{node.label}</bdi>
        {node.type ? <span class="dim">{node.type}</span> : null}
      </button>
      {node.path === firstSite(data) ? <span class="tag">first</span> : null}
      {node.bad ? <span class="badge">{counted(node.bad)}</span> : null}
    </div>
  );
}

function firstSite(data: Data): string | null {
  return data.first === null ? null : data.table.word("site", data.first);
}

/** At first the tree is open where the first divergence is, or everywhere if it is small. */
function opened(data: Data): ReadonlySet<string> {
  const { tree } = data;
  if (tree.nodes.size <= SMALL) return new Set(tree.nodes.keys());
  const first = firstSite(data);
  return new Set([...tree.tops.map((top) => top.path), ...(first ? lineage(tree, first).slice(1) : [])]);
}
