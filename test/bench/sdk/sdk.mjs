// The official JavaScript SDK, measured: unmodified, as its documentation has it
// used. Reads and writes what sdk.py does.
import assert from "node:assert/strict";
import { createInterface } from "node:readline";

import { Sandbox } from "@alibaba-group/opensandbox";

const standing = new Map();

async function first(runtime) {
  const start = performance.now();
  const sandbox = await Sandbox.create({
    image: "base",
    timeoutSeconds: 600,
    resource: { cpu: "1", memory: "512Mi" },
    extensions: { "sandboxd.runtime": runtime },
  });
  const execution = await sandbox.commands.run("echo hello");
  const took = performance.now() - start;
  assert.equal(execution.logs.stdout[0].text.trimEnd(), "hello");
  await sandbox.close();
  return [took, sandbox.id];
}

async function stream(sandboxId, command) {
  const sandbox = standing.get(sandboxId) ?? (await Sandbox.connect({ sandboxId }));
  standing.set(sandboxId, sandbox);
  const start = performance.now();
  const execution = await sandbox.commands.run(command);
  const took = performance.now() - start;
  assert.equal(execution.exitCode, 0, JSON.stringify(execution.error));
  return [took / 1000, execution.logs.stdout.reduce((n, m) => n + m.text.length, 0)];
}

for await (const line of createInterface({ input: process.stdin })) {
  const [verb, one, ...rest] = line.split(" ");
  const came = verb === "first" ? await first(one) : await stream(one, rest.join(" "));
  process.stdout.write(came.join(" ") + "\n");
}
process.exit(0); // whatever connections the SDK keeps
