// CompatCanary: every probe of chat completions and the Responses API must pass.
import assert from "node:assert/strict";
import { execFileSync } from "node:child_process";

const options = ["scan", "--base-url", `${process.env.BASE_URL}/v1`, "--model", "demo", "--format", "json"];
const script = new URL("node_modules/compatcanary/src/cli.js", import.meta.url).pathname;
const report = JSON.parse(execFileSync(process.execPath, [script, ...options, "--fail-on", "never"]));
assert.equal(report.score, 100, JSON.stringify(report));
