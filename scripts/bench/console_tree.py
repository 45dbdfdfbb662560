"""How long the console takes to lay out and to draw a prefix tree, in a real Chromium.

    python -m scripts.bench.console_tree [--nodes 10000]

The trees are made up: one system prompt, many conversations that branch. A frame is drawn with every edge glowing.
"""

import argparse
import sys

from playwright.sync_api import Page

from server.app.config import ServerConfig
from tests.support.apps import create_app
from tests.support.browser import BROWSER, browser
from tests.support.fake_engine import FakeEngine, fake_model
from tests.support.live_server import running

PROGRAM = """async ({ count, frames }) => {
    const { view } = await import("/console/views/tree.js");
    const root = document.createElement("section");
    root.className = "view tree";
    document.getElementById("main").replaceChildren(root);
    let random = 7;
    const next = () => (random = (random * 16807) % 2147483647) / 2147483647;
    const make = (shift) => {
        const nodes = [];
        for (let id = 1; id <= count; id += 1) {
            const parent = id === 1 ? null : next() < 0.7 ? id - 1 - Math.floor(next() * Math.min(id - 1, 12)) : 1;
            const above = parent ? nodes[parent - 1] : { stop: 0 };
            const tokens = 20 + Math.floor(next() * 400);
            nodes.push({ id, parent, start: above.stop, stop: above.stop + tokens, tokens, bytes: tokens * 900, tier: id % 3 ? "memory" : "live",
                         uses: id + shift, disk_tokens: 0, preview: "You are a careful assistant", restore_point: null, pinned: false });
        }
        return { nodes, disk_nodes: [], namespace: "", model: "m", num_nodes: count, namespaces: null, truncated: false, sessions: [], earlier: [], evictions: 0 };
    };
    const app = { api: { get: () => new Promise(() => {}) }, live: { subscribe() {}, stats: null, changes: 0 }, toast() {} };
    const control = view.mount(root, app);
    control.show();
    random = 7;
    control.paintNow(make(0));
    const laid = [], drawn = [];
    for (let frame = 0; frame < frames; frame += 1) {
        random = 7;
        const cache = make(frame + 1);
        const begun = performance.now();
        const painted = control.paintNow(cache);
        laid.push(performance.now() - begun - painted);
        drawn.push(painted);
    }
    const middle = (list) => list.sort((a, b) => a - b)[Math.floor(list.length / 2)];
    return { layout: middle(laid), draw: middle(drawn), worst: Math.max(...drawn) };
}"""


def measure(page: Page, count: int, frames: int) -> dict[str, float]:
    """Returns milliseconds: medians of layout and of drawing, and the slowest frame."""
    figures: dict[str, float] = page.evaluate(PROGRAM, {"count": count, "frames": frames})
    return figures


def main() -> int:
    """Measures, and prints a line for each size; returns an exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, nargs="+", default=[100, 1000, 10_000])
    parser.add_argument("--frames", type=int, default=30)
    options = parser.parse_args()
    if BROWSER is None:
        print("no Chromium was found", file=sys.stderr)
        return 1
    app = create_app(FakeEngine(), fake_model(), ServerConfig())
    with running(app) as address, browser() as chromium:
        page = chromium.new_page(viewport={"width": 1280, "height": 800})
        page.goto(f"{address}/#/models")
        for count in options.nodes:
            figures = measure(page, count, options.frames)
            print(
                f"{count:6} edges: layout {figures['layout']:.1f} ms, frame {figures['draw']:.1f} ms, "
                f"slowest frame {figures['worst']:.1f} ms"
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
