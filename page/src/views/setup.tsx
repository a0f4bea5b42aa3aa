// What was set differently in the two runs: the first differences at the top, and a table of all.

import type { Setting } from "../documents";
import { plural } from "../numbers";
import type { Go } from "../route";
import { Jump } from "./panes";

/** How many are shown at once; the table has all. */
const FEW = 5;

export function SetDifferently({ settings, go }: { settings: Setting[]; go: Go }) {
  if (!settings.length) return null;
  const withEffect = settings.filter((one) => one.effect !== "none known").slice(0, FEW);
  return (
    <div class="settings" data-test="setup">
      {withEffect.length ? (
        <dl class="around">
          <dt>set differently</dt>
          <dd>
            {withEffect.map((one) => (
              <div key={one.sentence}>
                <Jump row={one.row} sentence={one.sentence} go={go} />
              </div>
            ))}
          </dd>
        </dl>
      ) : null}
      <details class="notes">
        <summary>{plural(settings.length, "setting")} set differently</summary>
        <table class="settings-table">
          <thead>
            <tr>
              <th>what</th>
              <th>name</th>
              <th>reference</th>
              <th>candidate</th>
              <th>effect</th>
              <th>from</th>
            </tr>
          </thead>
          <tbody>
            {settings.map((one) => (
              <tr key={one.sentence}>
                <td>
                  <Jump row={one.row} sentence={one.subject} go={go} />
                </td>
                <td>{one.name}</td>
                <td>{one.reference}</td>
                <td>{one.candidate}</td>
                <td>{one.effect}</td>
                <td>{one.step === null ? "the start" : `step ${one.step}`}</td>
              </tr>
            ))}
          </tbody>
        </table>
      </details>
    </div>
  );
}
