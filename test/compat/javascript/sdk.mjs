// Every method of the official JavaScript SDK, unmodified.
//
// Usage: sdk.mjs RUNTIME. The daemon is named by OPEN_SANDBOX_DOMAIN and
// OPEN_SANDBOX_API_KEY, as the SDK's own documentation says; report.mjs says
// what it writes where.
import assert from "node:assert/strict";
import { randomBytes } from "node:crypto";
import { readdirSync } from "node:fs";
import path from "node:path";
import { setTimeout as sleep } from "node:timers/promises";

import * as opensandbox from "@alibaba-group/opensandbox";

import { Report, watch } from "./report.mjs";

const runtime = process.argv[2];
const me = `javascript-${runtime}`;
const report = new Report(me);

const SERVICES = {
  "Sandbox.commands": "ExecdCommands",
  "Sandbox.files": "SandboxFiles",
  "Sandbox.health": "ExecdHealth",
  "Sandbox.metrics": "ExecdMetrics",
  "Sandbox.isolation": "IsolationService",
  "Sandbox.credentialVault": "CredentialVault",
  "Sandbox.sandboxes": "Sandboxes",
};
const RESULTS = {
  "Sandbox.create": "Sandbox",
  "Sandbox.connect": "Sandbox",
  "Sandbox.resume": "Sandbox",
  "Sandbox.isolation.create": "IsolationSession",
  "SandboxManager.create": "SandboxManager",
};
const dist = path.join(import.meta.dirname, "node_modules", "@alibaba-group", "opensandbox", "dist");
const types = path.join(dist, readdirSync(dist).find((f) => /^sandboxes-.*\.d\.ts$/.test(f)));
for (const [name, type] of Object.entries(SERVICES)) report.surface(name, types, type);
report.surface("IsolationSession", types, "IsolationSession");
report.surface("Sandbox", path.join(dist, "index.d.ts"), "Sandbox");
report.surface("SandboxManager", path.join(dist, "index.d.ts"), "SandboxManager");
const watched = (it, name) => watch(report, it, name, new Set(Object.keys(SERVICES)), RESULTS);
const Sandbox = watched(opensandbox.Sandbox, "Sandbox");
const SandboxManager = watched(opensandbox.SandboxManager, "SandboxManager");

const where = { extensions: { "sandboxd.runtime": runtime }, resource: { cpu: "1", memory: "256Mi" } };
const mine = { program: me };
const deny = { defaultAction: "deny", egress: [{ action: "allow", target: "203.0.113.0/24" }] };
const rowsOf = (pattern) => [...report.rows].filter((r) => pattern.test(r));
const out = (execution) => execution.logs.stdout.map((m) => m.text.replace(/\n$/, "")).join("\n");

// until asks until the answer is as it should be: states come by polling in this protocol.
async function until(what, ask, ok) {
  for (const end = Date.now() + 30_000; ; await sleep(50)) {
    const answer = await ask();
    if (ok(answer)) return answer;
    assert(Date.now() < end, `${what}: still ${JSON.stringify(answer)} after 30 s`);
  }
}

const refused = (status, call) =>
  assert.rejects(call, (e) => {
    assert.equal(e.statusCode, status, `${e.name}: ${e.message}`);
    return e instanceof opensandbox.SandboxException;
  });

async function collect(stream) {
  const chunks = [];
  for await (const chunk of stream) chunks.push(chunk);
  return Buffer.concat(chunks);
}

async function lifecycle(s) {
  await report.chapter("create and look", [], async () => {
    await s.waitUntilReady({ readyTimeoutSeconds: 30, pollingIntervalMillis: 50 });
    assert(await s.isHealthy());
    assert(await s.health.ping());
    const info = await s.getInfo();
    assert.equal(info.id, s.id);
    assert.equal(info.status.state, "Running");
    assert.deepEqual(info.entrypoint, ["tail", "-f", "/dev/null"]);
    assert.deepEqual(info.metadata, mine);
    assert.deepEqual(info.platform, { os: "linux", arch: "amd64" });
    assert.equal(info.extensions["sandboxd.runtime"], runtime);
    const again = await Sandbox.connect({ sandboxId: s.id });
    assert.equal(out(await again.commands.run("echo $GREETING")), "hello");
    await again.close();
    for (const m of [await s.getMetrics(), await s.metrics.getMetrics()]) {
      assert(m.memoryUsedMiB > 0 && m.memoryUsedMiB <= m.memoryTotalMiB && m.memoryTotalMiB <= 260, JSON.stringify(m));
      assert(m.cpuCount >= 1 && m.timestamp > 1e12, JSON.stringify(m));
    }
    const at = await s.getEndpoint(8000);
    assert.match(at.endpoint, /^[^:/]+:\d+\/.*\/8000$/);
    assert.equal(await s.getEndpointUrl(8000), `http://${at.endpoint}`);
    await refused(404, Sandbox.connect({ sandboxId: "no-such-sandbox" }));
    await refused(404, Sandbox.create({ image: "no-such-image", ...where }));
  });

  await report.chapter("renew and relabel", [], async () => {
    const { expiresAt } = await s.renew(3600);
    assert(Math.abs(expiresAt - Date.now() - 3600_000) < 60_000, `${expiresAt}`);
    assert.deepEqual((await s.getInfo()).expiresAt, expiresAt);
    assert.deepEqual((await s.patchMetadata({ step: "two" })).metadata, { ...mine, step: "two" });
    assert.deepEqual((await s.patchMetadata({ step: null })).metadata, mine);
  });

  await report.chapter("signed endpoints", ["Sandbox.getSignedEndpoint", "Sandbox.sandboxes.getSignedEndpoint"], async () => {
    const expires = Math.floor(Date.now() / 1000) + 600;
    assert((await s.getSignedEndpoint(8000, expires)).endpoint);
    assert((await s.sandboxes.getSignedEndpoint(s.id, 8000, expires)).endpoint);
  });
}

async function commands(s) {
  const c = s.commands;
  await report.chapter("commands", [], async () => {
    let e = await c.run("echo out; echo oops >&2; exit 7");
    assert.equal(out(e), "out");
    assert.equal(e.logs.stderr.map((m) => m.text).join("").trim(), "oops");
    assert.equal(e.exitCode, 7);
    assert.equal(e.error.name, "CommandExecError");
    const opts = { workingDirectory: "/var", envs: { A: "é\nz" }, uid: 65534, gid: 65534 };
    e = await c.run('pwd; id -u; id -g; printf %s "$A"', opts);
    assert.equal(out(e), "/var\n65534\n65534\né\nz");
    assert.equal(e.exitCode, 0);
    e = await c.run("sleep 60", { timeoutSeconds: 1 });
    assert(e.error && e.exitCode !== 0, JSON.stringify(e));
    const events = [];
    await c.run("echo a; until test -e /tmp/heard-a; do sleep 0.05; done; echo b >&2; exit 9", undefined, {
      onInit: (i) => void events.push(Boolean(i.id)),
      onStdout: async (m) => {
        events.push(m.text.trim());
        await s.files.writeFiles([{ path: "/tmp/heard-a", data: "x" }]); // the command waits for it
      },
      onStderr: (m) => void events.push(m.text.trim()),
      onError: (x) => void events.push(x.value),
      onExecutionComplete: () => void events.push("complete"),
    });
    assert.deepEqual(events, [true, "a", "b", "9"]);
    const seen = [];
    for await (const event of c.runStream("echo streamed")) seen.push(event.type);
    assert.deepEqual(seen.filter((t) => t !== "ping"), ["init", "stdout", "execution_complete"]);
    const two = await Promise.all([c.run("sleep 0.2; echo 1"), c.run("echo 2")]);
    assert.deepEqual(two.map(out), ["1", "2"]);
  });

  await report.chapter("background commands", [], async () => {
    let e = await c.run("echo one; echo two; exit 3", { background: true });
    let status = await until("a command that exits", () => c.getCommandStatus(e.id), (st) => !st.running);
    assert.equal(status.exitCode, 3);
    const logs = await c.getBackgroundCommandLogs(e.id);
    assert.equal(logs.content, "one\ntwo\n");
    assert.deepEqual(await c.getBackgroundCommandLogs(e.id, logs.cursor), { content: "", cursor: logs.cursor });
    e = await c.run("sleep 1000", { background: true });
    assert((await c.getCommandStatus(e.id)).running);
    await c.interrupt(e.id);
    status = await until("a command after interrupt", () => c.getCommandStatus(e.id), (st) => !st.running);
    assert.notEqual(status.exitCode, 0);
  });

  const rows = ["createSession", "runInSession", "deleteSession"].map((m) => `Sandbox.commands.${m}`);
  await report.chapter("sessions", rows, async () => {
    const session = await c.createSession({ workingDirectory: "/var" });
    assert.equal(out(await c.runInSession(session, "export FOO=bar; cd /tmp; echo $PWD")), "/tmp");
    assert.equal(out(await c.runInSession(session, "echo $FOO; pwd")), "bar\n/tmp");
    const e = await c.runInSession(session, "pwd; false", { workingDirectory: "/usr", timeoutSeconds: 20 });
    assert.equal(out(e), "/usr");
    assert.equal(e.exitCode, 1);
    await c.deleteSession(session);
    await refused(404, c.runInSession(session, "true"));
  });
}

async function files(s) {
  const f = s.files;
  await report.chapter("files", [], async () => {
    await f.createDirectories([{ path: "/work/data", mode: 750 }]);
    const blob = randomBytes(1 << 20);
    await f.writeFiles([
      { path: "/work/data/a.txt", data: "häl\nlo\n", mode: 640, owner: "nobody", group: "nogroup" },
      { path: "/work/data/b.bin", data: blob },
      { path: "/work/data/c.txt", data: (async function* () { yield Buffer.from("c"); })() },
    ]);
    assert.equal(await f.readFile("/work/data/a.txt"), "häl\nlo\n");
    assert.equal(await f.readFile("/work/data/a.txt", { offset: 2, limit: 1 }), "lo");
    assert.deepEqual(Buffer.from(await f.readBytes("/work/data/b.bin", { range: "bytes=10-19" })), blob.subarray(10, 20));
    assert((await collect(f.readBytesStream("/work/data/b.bin"))).equals(blob));
    assert.equal(await f.readFile("/work/data/c.txt"), "c");
    const info = await f.getFileInfo(["/work/data/a.txt", "/work/data"]);
    const { mode, owner, group, type, size } = info["/work/data/a.txt"];
    assert.deepEqual({ mode, owner, group, type, size }, { mode: 640, owner: "nobody", group: "nogroup", type: "file", size: 8 });
    assert.equal(info["/work/data"].type, "directory");
    await f.setPermissions([{ path: "/work/data/a.txt", owner: "root", group: "root", mode: 600 }]);
    assert.equal((await f.getFileInfo(["/work/data/a.txt"]))["/work/data/a.txt"].mode, 600);
    const found = await f.search({ path: "/work", pattern: "*.txt" });
    assert.deepEqual(found.map((e) => e.path).sort(), ["/work/data/a.txt", "/work/data/c.txt"]);
    await f.replaceContents([{ path: "/work/data/a.txt", oldContent: "lo", newContent: "ll" }]);
    const counted = await f.replaceContentsDetailed([{ path: "/work/data/a.txt", oldContent: "l", newContent: "L" }]);
    assert.deepEqual(counted, [{ path: "/work/data/a.txt", replacedCount: 3 }]);
    await f.moveFiles([{ src: "/work/data/c.txt", dest: "/work/moved/c.txt" }]);
    const listed = await f.listDirectory({ path: "/work", depth: 1 });
    assert.deepEqual(listed.map((e) => e.path), ["/work/data", "/work/moved"]);
    await f.deleteFiles(["/work/moved/c.txt"]);
    await f.deleteDirectories(["/work/data"]);
    await refused(404, f.readFile("/work/data/a.txt"));
    assert.deepEqual(await f.search({ path: "/work", pattern: "*" }), []);
  });
}

async function network(s) {
  await report.chapter("network policy", ["Sandbox.create({networkPolicy: addresses})"], async () => {
    const policy = await s.getEgressPolicy();
    assert.equal(policy.defaultAction, "deny");
    assert.deepEqual(policy.egress.map((r) => r.target), ["203.0.113.0/24"]);
  });

  await report.chapter("policy changes", ["Sandbox.patchEgressRules", "Sandbox.deleteEgressRules"], async () => {
    await s.patchEgressRules([{ action: "allow", target: "198.51.100.7" }]);
    assert.deepEqual((await s.getEgressPolicy()).egress.map((r) => r.target), ["198.51.100.7", "203.0.113.0/24"]);
    await s.deleteEgressRules(["198.51.100.7", "never-was.example.com"]);
    assert.deepEqual((await s.getEgressPolicy()).egress.map((r) => r.target), ["203.0.113.0/24"]);
  });

  await report.chapter("policies by name", ["Sandbox.create({networkPolicy: names})"], async () => {
    const networkPolicy = { defaultAction: "deny", egress: [{ action: "allow", target: "*.example.com" }] };
    const other = await Sandbox.create({ image: "base", networkPolicy, ...where });
    assert.deepEqual((await other.getEgressPolicy()).egress.map((r) => r.target), ["*.example.com"]);
    const get = async (name) => {
      const ran = await other.commands.run(`curl -sS -m 9 http://${name}/`);
      return [ran.exitCode, out(ran).trim()];
    };
    assert.deepEqual(await get("www.example.com"), [0, "this is www.example.com"]);
    assert.equal((await get("pypi.org"))[0], 6); // could not resolve: refused at once
    await other.patchEgressRules([{ action: "allow", target: "pypi.org" }]);
    assert.deepEqual(await get("pypi.org"), [0, "this is pypi.org"]);
    await other.deleteEgressRules(["*.example.com"]);
    assert.equal((await get("www.example.com"))[0], 6);
    await end(other);
  });

  await report.chapter("credential vault", ["Sandbox.create({credentialProxy})", ...rowsOf(/Vault\./)], async () => {
    const networkPolicy = { defaultAction: "deny", egress: [{ action: "allow", target: "api.example.com" }] };
    const proxied = await Sandbox.create({ image: "base", networkPolicy, credentialProxy: { enabled: true }, ...where });
    const vault = proxied.credentialVault;
    const credentials = [{ name: "token", source: { value: "secret" } }];
    const match = { schemes: ["https"], hosts: ["api.example.com"] };
    const bindings = [{ name: "api", match, auth: { type: "bearer", credential: "token" } }];
    assert.equal((await vault.create({ credentials, bindings })).revision, 1);
    assert.equal((await vault.get()).revision, 1);
    assert.equal((await vault.patch({ expectedRevision: 1, credentials: { replace: credentials } })).revision, 2);
    assert.equal((await vault.listCredentials())[0].name, "token");
    assert.equal((await vault.getCredential("token")).sourceType, "inline");
    assert.equal((await vault.listBindings())[0].name, "api");
    assert.equal((await vault.getBinding("api")).auth.type, "bearer");
    await vault.delete();
    await refused(404, vault.get());
    await end(proxied);
    await refused(412, s.credentialVault.create({ credentials, bindings }));
  });
}

async function end(s) {
  await s.kill();
  await s.close();
}

async function options() {
  await report.chapter("secure access", ["Sandbox.create({secureAccess})"], async () => {
    const s = await Sandbox.create({ image: "base", secureAccess: true, ...where });
    const status = async (endpoint, headers) => (await fetch(`http://${endpoint}/`, { headers })).status;
    const at = await s.getEndpoint(8000), signed = await s.getSignedEndpoint(8000, Math.floor(Date.now() / 1000) + 600);
    // Nothing listens there, which only those who are let in are told.
    assert.deepEqual([await status(at.endpoint), await status(at.endpoint, at.headers), await status(signed.endpoint)], [401, 502, 502]);
    await end(s);
  });

  await report.chapter("volumes", ["Sandbox.create({volumes})"], async () => {
    const volumes = [{ name: "kept", pvc: { claimName: `${me}-kept` }, mountPath: "/kept" }];
    const first = await Sandbox.create({ image: "base", volumes, ...where });
    await first.files.writeFiles([{ path: "/kept/file", data: "x" }]);
    await end(first);
    const second = await Sandbox.create({ image: "base", volumes, ...where });
    assert.equal(await second.files.readFile("/kept/file"), "x");
    await end(second);
  });
}

async function isolation(s) {
  await report.chapter("isolation: what there is", ["Sandbox.isolation.capabilities"], async () => {
    const can = await s.isolation.capabilities();
    assert.equal(can.available, false);
    assert(can.message);
  });
  const rows = rowsOf(/solation/).filter((r) => !r.endsWith(".capabilities"));
  await report.chapter("isolated sessions", rows, async () => {
    const session = await s.isolation.create({ workspace: { path: "/tmp", mode: "rw" } });
    assert.equal(out(await session.run("echo hi")), "hi");
  });
}

async function administration(s) {
  const manager = SandboxManager.create();
  await report.chapter("manager", [], async () => {
    const page = await manager.listSandboxInfos({ states: ["Running"], metadata: mine, page: 1, pageSize: 5 });
    assert.deepEqual(page.items.map((i) => i.id), [s.id]);
    assert.equal(page.pagination.totalItems, 1);
    assert.equal((await manager.getSandboxInfo(s.id)).id, s.id);
    assert.equal((await manager.patchSandboxMetadata(s.id, { by: "manager" })).metadata.by, "manager");
    await manager.renewSandbox(s.id, 1800);
    assert((await s.getInfo()).expiresAt - Date.now() < 1800_000);
    await refused(404, manager.getSandboxInfo("no-such-sandbox"));
  });

  await report.chapter("the lifecycle service below", [], async () => {
    const low = s.sandboxes;
    const made = await low.createSandbox({
      image: { uri: "base" }, entrypoint: ["tail", "-f", "/dev/null"], timeout: 600,
      resourceLimits: where.resource, extensions: where.extensions, metadata: { low: me },
    });
    await until("a sandbox", () => low.getSandbox(made.id), (i) => i.status.state === "Running");
    assert.equal((await low.listSandboxes({ metadata: { low: me } })).items.length, 1);
    assert.equal((await low.patchSandboxMetadata(made.id, { low: "x" })).metadata.low, "x");
    await low.renewSandboxExpiration(made.id, { expiresAt: new Date(Date.now() + 600_000).toISOString() });
    assert.match((await low.getSandboxEndpoint(made.id, 8000, true)).endpoint, /proxy\/8000$/);
    low.invalidateEndpointCache(made.id);
    await low.pauseSandbox(made.id);
    await until("a sandbox after pause", () => low.getSandbox(made.id), (i) => i.status.state === "Paused");
    await low.resumeSandbox(made.id);
    await until("a sandbox after resume", () => low.getSandbox(made.id), (i) => i.status.state === "Running");
    const kept = await low.createSnapshot(made.id, { name: `${me}-low` });
    await until("a snapshot", () => low.getSnapshot(kept.id), (i) => i.status.state === "Ready");
    assert.equal((await low.listSnapshots({ sandboxId: made.id })).items.length, 1);
    await low.deleteSnapshot(kept.id);
    await low.deleteSandbox(made.id);
    await refused(404, low.getSandbox(made.id));
  });

  await report.chapter("pause and resume", [], async () => {
    const paused = ["the sandbox after pause", () => s.getInfo(), (i) => i.status.state === "Paused"];
    await s.pause();
    await until(...paused);
    assert.equal(await s.isHealthy(), false);
    const resumed = await s.resume(); // shares the connections of s: closing it would close them
    assert.equal(out(await resumed.commands.run("echo back")), "back");
    await manager.pauseSandbox(s.id);
    await until(...paused);
    await refused(409, manager.pauseSandbox(s.id));
    await manager.resumeSandbox(s.id);
    await until("the sandbox after resume", () => s.getInfo(), (i) => i.status.state === "Running");
  });

  await report.chapter("snapshots", ["Sandbox.create({snapshotId})"], async () => {
    await s.commands.run("echo before >/root/kept");
    const made = await manager.createSnapshot(s.id, { name: `${me}-first` });
    assert.equal(made.status.state, "Creating");
    const ready = await until("a snapshot", () => manager.getSnapshot(made.id), (i) => i.status.state !== "Creating");
    assert.equal(ready.status.state, "Ready");
    const page = await manager.listSnapshots({ sandboxId: s.id, states: ["Ready"] });
    assert.deepEqual(page.items.map((i) => i.id), [made.id]);
    const restored = await Sandbox.create({ snapshotId: made.id, ...where });
    assert.equal(out(await restored.commands.run("cat /root/kept")), "before");
    await end(restored);
    await manager.deleteSnapshot(made.id);
    await refused(404, manager.getSnapshot(made.id));
  });
  return manager;
}

const s = await Sandbox.create({
  image: "base", timeoutSeconds: 600, env: { GREETING: "hello" }, metadata: mine,
  platform: { os: "linux", arch: "amd64" }, resourceRequests: { cpu: "100m" }, networkPolicy: deny, ...where,
});
for (const part of [lifecycle, commands, files, network, isolation]) await part(s);
const manager = await administration(s);
await options();

await report.chapter("the end of sandboxes", [], async () => {
  await end(s);
  await refused(404, manager.getSandboxInfo(s.id));
  let asked = 0;
  const other = await Sandbox.create({ image: "base", timeoutSeconds: null, healthCheck: () => ++asked > 1, healthCheckPollingInterval: 10, ...where });
  assert.equal(asked, 2);
  assert.equal((await other.getInfo()).expiresAt, null);
  await manager.killSandbox(other.id);
  await refused(404, other.getInfo());
  await refused(404, manager.killSandbox(other.id));
  await other.close();
  await manager.close();
});
report.write();
