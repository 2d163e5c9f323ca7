package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
)

// output returns what a program prints.
func output(ctx context.Context, name string, args ...string) (string, error) {
	var out, problem strings.Builder
	command := exec.CommandContext(ctx, name, args...)
	command.Env = append(os.Environ(), "GOOS=linux", "CGO_ENABLED=0")
	command.Stdout, command.Stderr = &out, &problem
	if err := command.Run(); err != nil {
		return "", fmt.Errorf("%s %s: %w\n%s", name, strings.Join(args, " "), err, problem.String())
	}
	return out.String(), nil
}

// changedSince lists the files that differ from a commit, also those that are not committed yet.
func changedSince(ctx context.Context, base string) ([]string, error) {
	changed, err := output(ctx, "git", "-c", "core.quotePath=false", "diff", "--name-only", "--no-renames", base, "--")
	if err != nil {
		return nil, err
	}
	added, err := output(ctx, "git", "-c", "core.quotePath=false", "ls-files", "--others", "--exclude-standard")
	if err != nil {
		return nil, err
	}
	return strings.Fields(changed + added), nil
}

// modulePath is what packages of the repository begin with, which pkg leaves out.
const modulePath = "github.com/serviceplane/serviceplane"

// list reads the packages of the repository as they are on Linux, with the tests for virtual machines.
func list(ctx context.Context) (module, error) {
	text, err := output(ctx, "go", "list", "-tags=vm", "-json=ImportPath,Imports,TestImports,XTestImports", "./...", "./nodeproxy/...")
	if err != nil {
		return nil, err
	}
	return parse(text)
}

// parse reads the output of go list -json.
func parse(text string) (module, error) {
	m := module{}
	for decoder := json.NewDecoder(strings.NewReader(text)); ; {
		var p struct {
			ImportPath                         string
			Imports, TestImports, XTestImports []string
		}
		if err := decoder.Decode(&p); errors.Is(err, io.EOF) {
			return m, nil
		} else if err != nil {
			return nil, fmt.Errorf("read the output of go list: %w", err)
		}
		for _, folder := range folders([]string{p.ImportPath}) {
			m[folder] = &pkg{folders(p.Imports), folders(append(p.TestImports, p.XTestImports...))}
		}
	}
}

// folders returns where the packages of the repository are, of those that are named.
func folders(imports []string) (some []string) {
	for _, i := range imports {
		if i == modulePath {
			some = append(some, ".")
		} else if folder, ok := strings.CutPrefix(i, modulePath+"/"); ok {
			some = append(some, folder)
		}
	}
	return some
}
