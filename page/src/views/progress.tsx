// The progress of a comparison.

import { useEffect, useState } from "preact/hooks";
import type { Job } from "../documents";
import { counted } from "../numbers";
import type { Source } from "../source";

/** The progress of the comparison, with a button to stop it; and the error that ended it, if any. */
export function Progress({ job, source }: { job: Job; source: Source }) {
  const [stopping, setStopping] = useState(false);
  useEffect(() => setStopping(false), [job.state]);
  if (job.state === "failed" || job.state === "stopped") {
    const said = job.text || (job.state === "failed" ? "The comparison failed." : "The comparison was stopped.");
    return (
      <div class={`progress progress-${job.state}`} role="alert" data-test="progress">
        {said}
      </div>
    );
  }
  if (job.state !== "running") return null;
  return (
    <div class="progress" role="status" data-test="progress">
      <span class="spinner" />
      <span class="progress-text">{job.text || "comparing"}</span>
      <progress max={job.total || 1} value={job.total ? job.done : undefined} />
      <span class="dim">{job.total ? `${counted(job.done)} of ${counted(job.total)}` : ""}</span>
      {source.stop ? (
        <button
          type="button"
          disabled={stopping}
          onClick={() => {
            setStopping(true);
            source.stop!().catch(() => setStopping(false));
          }}
        >
          {stopping ? "Stopping…" : "Stop"}
        </button>
      ) : null}
    </div>
  );
}
