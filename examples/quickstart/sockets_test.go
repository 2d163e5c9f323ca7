package main

import (
	"bytes"
	"regexp"
	"strings"
	"testing"
)

// TestUserspace needs no privilege: endpoints answer in turn, policies and source ranges
// apply, and a Service without endpoints gets one on demand.
func TestUserspace(t *testing.T) {
	var out bytes.Buffer
	if err := run(t.Context(), &out, "", options{mode: modeUserspace}); err != nil {
		t.Fatalf("run: %v", err)
	}
	text := out.String()
	for rule, pattern := range map[string]string{
		"endpoints in turn": `default/web +127\.0\.0\.1:\d+/TCP +internal +this process +web-1 x4, web-2 x4, web-3 x4\n`,
		"both families":     `\[::1\]:\d+/TCP +internal +this process +web-1 x4, web-2 x4, web-3 x4\n`,
		"UDP":               `kube-dns +127\.0\.0\.1:\d+/UDP +internal +this process +dns-1 x6, dns-2 x6\n`,
		"session affinity":  `default/cart +127\.0\.0\.1:\d+/TCP +internal +this process +cart-\d x12\n`,
		"source ranges":     `restricted +this process +nobody: reset x12\n`,
		"scale from zero":   `default/idle +127\.0\.0\.1:\d+/TCP +internal +this process +idle, started on demand x12\n`,
	} {
		if !regexp.MustCompile(pattern).MatchString(text) {
			t.Errorf("%s: no %s in\n%s", rule, pattern, text)
		}
	}
	if strings.Contains(text, "default/db") {
		t.Error("the headless Service is proxied")
	}
}

func TestUserspaceHasNoPlan(t *testing.T) {
	var out bytes.Buffer
	if err := run(t.Context(), &out, "", options{mode: modeUserspace, planOnly: true}); err == nil {
		t.Errorf("run = nil and %q, want an error", &out)
	}
}
