// Package gocmd runs programs, and reads what the go command prints.
package gocmd

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"iter"
	"os"
	"os/exec"
	"strings"
)

// Module is the path of the repository's main module.
const Module = "github.com/serviceplane/serviceplane"

// Output runs a program in a folder, with more environment variables, and returns what it prints.
func Output(ctx context.Context, folder string, env []string, argv ...string) ([]byte, error) {
	command := exec.CommandContext(ctx, argv[0], argv[1:]...)
	command.Dir, command.Env = folder, append(os.Environ(), env...)
	out, err := command.Output()
	if exit, ok := errors.AsType[*exec.ExitError](err); ok {
		err = fmt.Errorf("%w\n%s", err, exit.Stderr)
	}
	if err != nil {
		return nil, fmt.Errorf("%s: %w", strings.Join(argv, " "), err)
	}
	return out, nil
}

// Package is what go list says about a package, or about the tests of one.
type Package struct {
	ImportPath                         string
	Imports, TestImports, XTestImports []string
	Deps                               []string // what it imports, directly or not
	CgoFiles                           []string
}

// List returns the packages of all modules of the repository in a folder.
func List(ctx context.Context, root string, env []string, flags ...string) (all []Package, err error) {
	argv := append([]string{"go", "list", "-json=ImportPath,Imports,TestImports,XTestImports,Deps,CgoFiles"}, flags...)
	out, err := Output(ctx, root, env, append(argv, "work")...)
	for d := json.NewDecoder(bytes.NewReader(out)); err == nil && d.More(); {
		var p Package
		err = d.Decode(&p)
		all = append(all, p)
	}
	return all, err
}

// Event is one line of go test -json, see go doc test2json.
type Event struct {
	Action, Package, Test, Output string
	Elapsed                       float64 // seconds
}

// Events reads the output of go test -json. A line that is no event is what a build printed.
func Events(text []byte) iter.Seq[Event] {
	return func(yield func(Event) bool) {
		for line := range bytes.Lines(text) {
			var e Event
			if json.Unmarshal(line, &e) != nil {
				e = Event{Action: "build-output", Output: string(line)}
			}
			if !yield(e) {
				return
			}
		}
	}
}
