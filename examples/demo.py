"""`make demo`: trains a small GPT twice, the second time with a planted fault, and lets astray find it; then once more,
until its loss is infinite.

Every command it runs is one you can type yourself; they are printed as it goes. What it makes is in runs/demo, or in
the folder it is given, and stays there to be looked at.
"""

import shutil
import subprocess
import sys
from pathlib import Path

from astray.web.html import STATIC

SCRIPT = Path(__file__).with_name("train_gpt.py")


def shell(*words: str, expect: int = 0) -> None:
    print(f"\n$ {' '.join(words)}", flush=True)
    command = [sys.executable, "-m", "astray", *words[1:]] if words[0] == "astray" else list(words)
    code = subprocess.run(command, check=False).returncode
    if code != expect:
        sys.exit(f"demo: that exited with {code} instead of {expect}.")


def main(folder: Path) -> None:
    script = SCRIPT.relative_to(Path.cwd()) if SCRIPT.is_relative_to(Path.cwd()) else SCRIPT
    shutil.rmtree(folder, ignore_errors=True)
    good, bad, page = f"{folder}/good", f"{folder}/bad", f"{folder}/diff.html"
    html = ["--html", page] if (STATIC / "page.js").exists() else []
    print("A small GPT is trained twice. The second time, one weight is scaled by 1.001 from step 3 on.")
    shell("astray", "run", "-o", good, str(script))
    shell("astray", "run", "-o", bad, str(script), "--fault")
    print("\nThe losses hardly tell. Where did it go astray?")
    shell("astray", "compare", good, bad, *html, expect=1)
    print("\nThe fault was planted in h.2.mlp.proj at step 3.")
    print("\nOnce more, with a loss that is computed by hand. It becomes infinite: where does that come from?")
    shell("astray", "check", "-o", f"{folder}/found", str(script), "--by-hand", "--lr", "1", expect=1)
    if html:
        print(f"\nThe first answer, to be looked at in a browser: {page}")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/demo"))
