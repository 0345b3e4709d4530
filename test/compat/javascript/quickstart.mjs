// Runs a block of the SDK's README: one that is a program as it stands, and one
// that begins in the middle with what the README had before it.
//
// Usage: quickstart.mjs FILE
import { mkdtempSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import path from "node:path";
import { pathToFileURL } from "node:url";

const before = `
import { ConnectionConfig, Sandbox } from "@alibaba-group/opensandbox";
const config = new ConnectionConfig({ domain: "api.opensandbox.io", apiKey: "your-api-key" });
`;
const file = process.argv[2];
const block = readFileSync(file, "utf8");
let program = block;
if (!block.includes("new ConnectionConfig")) {
  const sandbox = block.includes("const sandbox =") ? "" : 'const sandbox = await Sandbox.create({ connectionConfig: config, image: "ubuntu" });\n';
  program = before + sandbox + block;
}
// Modules are looked for beside the program that imports them.
const dir = mkdtempSync(path.join(import.meta.dirname, "quickstart-"));
writeFileSync(path.join(dir, "program.mjs"), program);
await import(pathToFileURL(path.join(dir, "program.mjs"))).finally(() => rmSync(dir, { recursive: true }));
console.log("ran", file);
process.exit(); // what a block left open ends with it
