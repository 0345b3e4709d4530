// Runs a block of the SDK's README: one that is a program as it stands, and one
// that begins in the middle with what the README had before it. Types are erased.
//
// Usage: quickstart.mjs FILE
import { mkdtempSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import path from "node:path";
import { pathToFileURL } from "node:url";

import ts from "typescript";

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
const compilerOptions = { target: ts.ScriptTarget.ESNext, module: ts.ModuleKind.ESNext, verbatimModuleSyntax: true };
const erased = ts.transpileModule(program, { compilerOptions, reportDiagnostics: true });
if (erased.diagnostics.length) throw new Error(ts.formatDiagnostics(erased.diagnostics, ts.createCompilerHost(compilerOptions)));
// Modules are looked for beside the program that imports them.
const dir = mkdtempSync(path.join(import.meta.dirname, "quickstart-"));
writeFileSync(path.join(dir, "program.mjs"), erased.outputText);
await import(pathToFileURL(path.join(dir, "program.mjs"))).finally(() => rmSync(dir, { recursive: true }));
console.log("ran", file);
process.exit(); // what a block left open ends with it
