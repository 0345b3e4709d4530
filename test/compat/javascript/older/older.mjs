// What a program written for an older release of the official SDK does: the
// methods of 0.1.10, unmodified.
//
// Usage: older.mjs RUNTIME; else as sdk.mjs.
import assert from "node:assert/strict";
import { setTimeout as sleep } from "node:timers/promises";

import { Sandbox, SandboxException, SandboxManager } from "@alibaba-group/opensandbox";

const runtime = process.argv[2];
const where = { image: "base", timeoutSeconds: 600, extensions: { "sandboxd.runtime": runtime }, resource: { cpu: "1", memory: "256Mi" } };
const chapter = (name) => console.log(`older-javascript-${runtime}: ${name}`);
const texts = (execution) => execution.logs.stdout.map((m) => m.text); // one for each line, without its ending: so it was then

async function until(what, ask, ok) {
  for (const end = Date.now() + 30_000; ; await sleep(50)) {
    const answer = await ask();
    if (ok(answer)) return answer;
    assert(Date.now() < end, `${what}: still ${JSON.stringify(answer)} after 30 s`);
  }
}

chapter("create");
const networkPolicy = { defaultAction: "deny", egress: [{ action: "allow", target: "203.0.113.0/24" }] };
const sandbox = await Sandbox.create({ ...where, env: { GREETING: "hello" }, metadata: { older: `javascript-${runtime}` }, networkPolicy });
assert(await sandbox.isHealthy());
assert.equal((await sandbox.getInfo()).status.state, "Running");
assert.deepEqual((await sandbox.getEgressPolicy()).egress, networkPolicy.egress);
await assert.rejects(Sandbox.create({ ...where, image: "no-such-image" }), (e) => e instanceof SandboxException && e.statusCode === 404);

chapter("commands");
const seen = [];
let e = await sandbox.commands.run("echo $GREETING; echo there; echo oops >&2; exit 7", undefined, { onStdout: (m) => void seen.push(m.text) });
assert.deepEqual(texts(e), ["hello", "there"]);
assert.deepEqual(seen, ["hello", "there"]);
assert.deepEqual(e.logs.stderr.map((m) => m.text), ["oops"]);
assert.equal(e.exitCode, 7);
e = await sandbox.commands.run("echo late", { background: true });
await until("a command that exits", () => sandbox.commands.getCommandStatus(e.id), (st) => !st.running);
assert.equal((await sandbox.commands.getBackgroundCommandLogs(e.id)).content, "late\n");

chapter("sessions");
const session = await sandbox.commands.createSession();
await sandbox.commands.runInSession(session, "cd /usr; kept=here");
assert.deepEqual(texts(await sandbox.commands.runInSession(session, "pwd; echo $kept")), ["/usr", "here"]);
await sandbox.commands.deleteSession(session);

chapter("files");
await sandbox.files.writeFiles([{ path: "/tmp/hello.txt", data: "Hello", mode: 644 }]);
assert.equal(await sandbox.files.readFile("/tmp/hello.txt"), "Hello");
await sandbox.files.replaceContents([{ path: "/tmp/hello.txt", oldContent: "Hello", newContent: "Bye" }]);
assert.equal(await sandbox.files.readFile("/tmp/hello.txt"), "Bye");
assert.deepEqual((await sandbox.files.search({ path: "/tmp", pattern: "*.txt" })).map((f) => f.path), ["/tmp/hello.txt"]);

chapter("manager");
const manager = SandboxManager.create();
const found = await manager.listSandboxInfos({ states: ["Running"], metadata: { older: `javascript-${runtime}` } });
assert.deepEqual(found.items.map((i) => i.id), [sandbox.id]);
await sandbox.renew(1800);
assert.match((await sandbox.getEndpoint(8000)).endpoint, /\/8000$/);
await sandbox.pause();
await until("a paused sandbox", () => sandbox.getInfo(), (i) => i.status.state === "Paused");
const resumed = await Sandbox.resume({ sandboxId: sandbox.id });
assert.deepEqual(texts(await resumed.commands.run("echo back")), ["back"]);
await manager.killSandbox(sandbox.id);
await Promise.all([manager.close(), resumed.close(), sandbox.close()]);
chapter("the end");
