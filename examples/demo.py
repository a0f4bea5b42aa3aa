"""`make demo`: trains a small GPT twice, the second time with a planted fault, and lets astray find it; then once more,
until its loss is infinite.

Every command it runs is one you can type yourself; they are printed as it goes.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

SCRIPT = Path(__file__).with_name("train_gpt.py")


def shell(*words: str, expect: int = 0) -> None:
    print(f"\n$ {' '.join(words)}", flush=True)
    command = [sys.executable, "-m", "astray", *words[1:]] if words[0] == "astray" else list(words)
    code = subprocess.run(command, check=False).returncode
    if code != expect:
        sys.exit(f"demo: that exited with {code} instead of {expect}.")


def main() -> None:
    script = SCRIPT.relative_to(Path.cwd()) if SCRIPT.is_relative_to(Path.cwd()) else SCRIPT
    with tempfile.TemporaryDirectory(prefix="astray-demo-") as folder:
        good, bad = f"{folder}/good", f"{folder}/bad"
        print("A small GPT is trained twice. The second time, one weight is scaled by 1.001 from step 3 on.")
        shell("astray", "run", "-o", good, str(script))
        shell("astray", "run", "-o", bad, str(script), "--fault")
        print("\nThe losses hardly tell. Where did it go astray?")
        shell("astray", "compare", good, bad, expect=1)
        print("\nThe fault was planted in h.2.mlp.proj at step 3.")
        print("\nOnce more, with a loss that is computed by hand. It becomes infinite: where does that come from?")
        shell("astray", "check", "-o", f"{folder}/found", str(script), "--by-hand", "--lr", "1", expect=1)


if __name__ == "__main__":
    main()
