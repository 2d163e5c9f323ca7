package main

import (
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

const shop = `
apiVersion: v1
kind: Service
metadata: {namespace: shop, name: web}
spec:
  clusterIP: 10.96.0.10
  ports: [{name: http, port: 80}]
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {namespace: shop, name: web-1, labels: {kubernetes.io/service-name: web}}
addressType: IPv4
ports: [{name: http, port: 8080}]
endpoints: [{addresses: [10.244.1.5]}]
`

func directory(t *testing.T, text string) string {
	t.Helper()
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "web.yaml"), []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return dir
}

// The same files give the same plan, also with several Services, for which the trackers have no order.
func TestTheSameFilesGiveTheSamePlan(t *testing.T) {
	for _, engine := range []string{"nftables", "iptables", "ipvs", "ebpf", "userspace"} {
		for range 5 {
			var difference strings.Builder
			if err := run(&difference, engine, "", []string{"../quickstart/cluster", "../quickstart/cluster"}); err != nil || difference.String() != "" {
				t.Fatalf("%s: a directory differs from itself by\n%s\n%v", engine, difference.String(), err)
			}
		}
	}
}

// Every engine plans a directory, and the change of an endpoint.
func TestEveryEnginePlans(t *testing.T) {
	before, after := directory(t, shop), directory(t, strings.Replace(shop, "10.244.1.5", "10.244.1.6", 1))
	for _, engine := range []string{"nftables", "iptables", "ipvs", "ebpf", "userspace"} {
		t.Run(engine, func(t *testing.T) {
			var plan, same, difference strings.Builder
			if err := run(&plan, engine, "node-1", []string{before}); err != nil {
				t.Fatal(err)
			}
			for _, want := range []string{"# IPv4", "10.244.1.5", "# IPv6"} {
				if !strings.Contains(plan.String(), want) {
					t.Errorf("plan lacks %q:\n%s", want, plan.String())
				}
			}
			if err := run(&same, engine, "node-1", []string{before, before}); err != nil || same.String() != "" {
				t.Errorf("a directory differs from itself by %q, %v", same.String(), err)
			}
			if err := run(&difference, engine, "node-1", []string{before, after}); err != nil {
				t.Fatal(err)
			}
			if got := difference.String(); !hasLine(got, "-", "10.244.1.5") || !hasLine(got, "+", "10.244.1.6") {
				t.Errorf("difference, want one endpoint out and another one in:\n%s", got)
			}
		})
	}
}

func hasLine(text, prefix, part string) bool {
	for line := range strings.Lines(text) {
		if strings.HasPrefix(line, prefix) && strings.Contains(line, part) {
			return true
		}
	}
	return false
}

func fifo(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	if err := syscall.Mkfifo(filepath.Join(dir, "fifo.yaml"), 0o600); err != nil {
		t.Fatal(err)
	}
	return dir
}

func TestErrors(t *testing.T) {
	for want, c := range map[string]struct {
		engine      string
		directories []string
	}{
		"want one directory":    {"nftables", nil},
		`engine "magic"`:        {"magic", []string{directory(t, shop)}},
		"web.yaml:":             {"nftables", []string{directory(t, "kind: Service\nmetadata: [")}},
		"no such file":          {"nftables", []string{"/nonexist"}},
		"not a directory":       {"nftables", []string{filepath.Join(directory(t, shop), "web.yaml")}},
		"no manifests":          {"nftables", []string{t.TempDir()}},
		"is not a regular file": {"nftables", []string{directory(t, shop), fifo(t)}},
	} {
		if err := run(&strings.Builder{}, c.engine, "", c.directories); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("run = %v, want an error with %q", err, want)
		}
	}
}
