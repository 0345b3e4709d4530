package main

import (
	"go/ast"
	"go/parser"
	"go/token"
	"path/filepath"
	"slices"
	"strings"
)

// rootTests returns the tests of a package that need root, and the others. A test needs
// root if its code, followed from function to function within the package, reaches
// hosttest.Root, Private or one of rootKits, or reads SANDBOXD_TEST. A test that reads
// raceEnabled also counts: it leaves something out under the race detector, and the
// others run under it.
//
// Functions are distinguished by name only, which finds too many tests rather than too
// few. A missed test skips under the race detector and runs nowhere else, which
// test/summary reports as a failure.
func rootTests(p pkg) (root, others []string, err error) {
	var tests []string
	uses := map[string][]string{} // names that a function mentions
	for _, name := range slices.Concat(p.TestGoFiles, p.XTestGoFiles) {
		file, err := parser.ParseFile(token.NewFileSet(), filepath.Join(p.Dir, name), nil, 0)
		if err != nil {
			return nil, nil, err
		}
		for _, d := range file.Decls {
			key := "" // set for functions; variables have their own names
			if f, ok := d.(*ast.FuncDecl); ok {
				key = f.Name.Name
				if strings.HasPrefix(key, "Test") && f.Recv == nil && key != "TestMain" {
					tests = append(tests, key)
				}
			}
			if g, ok := d.(*ast.GenDecl); ok {
				for _, s := range g.Specs {
					if v, ok := s.(*ast.ValueSpec); ok {
						for _, n := range v.Names {
							uses[n.Name] = append(uses[n.Name], mentions(v)...)
						}
					}
				}
				continue
			}
			uses[key] = append(uses[key], mentions(d)...)
		}
	}
	reaches := map[string]bool{gate: true}
	for more := true; more; {
		more = false
		for name, used := range uses {
			if !reaches[name] && slices.ContainsFunc(used, func(u string) bool { return reaches[u] }) {
				reaches[name], more = true, true
			}
		}
	}
	slices.Sort(tests)
	for _, t := range tests {
		if reaches[t] {
			root = append(root, t)
		} else {
			others = append(others, t)
		}
	}
	return root, others, nil
}

// rootKits are packages whose environments need root.
var rootKits = map[string]bool{"daemontest": true, "snapshottest": true, "runtimetest": true}

// gate stands for everything that asks for root.
const gate = "(root)"

// mentions lists the names in a declaration, and gate if it asks for root.
func mentions(n ast.Node) (names []string) {
	ast.Inspect(n, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.SelectorExpr:
			if x, ok := n.X.(*ast.Ident); ok && (rootKits[x.Name] || x.Name == "hosttest" &&
				(n.Sel.Name == "Root" || n.Sel.Name == "Private")) {
				names = append(names, gate)
			}
		case *ast.Ident:
			names = append(names, n.Name)
			if n.Name == "raceEnabled" {
				names = append(names, gate)
			}
		case *ast.CallExpr:
			if f, ok := n.Fun.(*ast.Ident); ok && f.Name == "Root" { // hosttest's own tests
				names = append(names, gate)
			}
		case *ast.BasicLit:
			if n.Value == `"SANDBOXD_TEST"` || n.Value == `"STORIES"` {
				names = append(names, gate)
			}
		}
		return true
	})
	return names
}
