package main

import (
	"bytes"
	"testing"

	"github.com/serviceplane/serviceplane/spctl"
)

// spctlRuns runs the command at a socket, and returns its output.
func spctlRuns(t *testing.T, socket string, args ...string) string {
	t.Helper()
	var out bytes.Buffer
	command := spctl.New(spctl.Options{Address: "unix://" + socket})
	command.SetArgs(args)
	command.SetOut(&out)
	if err := command.ExecuteContext(t.Context()); err != nil {
		t.Errorf("spctl %q = %v", args, err)
	}
	return out.String()
}
