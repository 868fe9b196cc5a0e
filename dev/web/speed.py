"""How fast a page's network is: a call for one picture in Node, in Chromium and in ./train_unet with one thread.

    python3 dev/web/speed.py data/faces_in_two_steps.html

Each time is that of a drawing in many steps, divided by their number: the best of many short drawings in rounds that take
turns, because other programs may use the machine too.
"""
import os
import pathlib
import re
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
sys.path += [str(HERE.parents[1]), str(HERE.parents[1] / "tests")]

from browser import browser

CALLS, DRAWINGS, ROUNDS = 100, 10, 5


def native(weights):
    """ms of a call of ./train_unet; weights: a .bin."""
    flags = ["--num_samples", "1", "--sampler", "ddim", "--sample_steps", str(CALLS), "--output_name", f"{weights}.npy"]
    command = [HERE.parents[1] / "train_unet", "--generate", "--model_weights", weights, *flags]
    told = [subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True,
                           check=True).stdout for _ in range(DRAWINGS)]
    return min(float(re.search(r", ([\d.]+)s each", line)[1]) for line in told) / CALLS * 1000


def in_node(page):
    return float(subprocess.run(["node", HERE / "speed.js", page], capture_output=True, text=True, check=True).stdout)


def in_chromium(page, opened):
    """ms of a call, and from the opening of the page to its pictures."""
    opened.open(page)
    opened.wait("document.body?.dataset.state == 'done'")
    drawn = opened.evaluate("performance.getEntriesByName('drawn')[0].startTime")
    opened.evaluate((HERE / "speed.js").read_text())
    return opened.evaluate("timeOfCall(JSON.parse(document.getElementById('model').textContent))"), drawn


def main():
    page = pathlib.Path(sys.argv[1]).resolve()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, browser(f"{folder}/profile") as opened:
        weights = pathlib.Path(folder) / "weights.bin"
        subprocess.run([sys.executable, HERE.parents[1] / "generate.py", "--model_weights", page, "--export", weights],
                       capture_output=True, check=True)
        rounds = [(native(weights), in_node(page), *in_chromium(page, opened)) for _ in range(ROUNDS)]
    least, node, chromium, drawn = map(min, zip(*rounds))
    for name, time in (("./train_unet, 1 thread", least), ("Node", node), ("Chromium", chromium)):
        print(f"{name:22} {time:6.2f} ms a call of one picture, {time / least:.2f} times the first")
    print(f"the first pictures of {page.name}: {drawn:.0f} ms after it was opened")


if __name__ == "__main__":
    main()
