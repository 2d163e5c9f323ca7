package gocmd

import (
	"fmt"
	"strings"
	"testing"
)

// What go test -json prints, mostly without times.
const (
	passes = `{"Action":"start","Package":"p"}
{"Action":"run","Package":"p","Test":"TestA"}
{"Action":"output","Package":"p","Test":"TestA","Output":"chatter\n"}
{"Action":"output","Package":"p","Test":"TestA","Output":"    a_test.go:7: 20 seeds from 4711; again: X_SEED=N\n"}
{"Action":"pass","Package":"p","Test":"TestA","Elapsed":1.25}
{"Action":"pass","Package":"p","Elapsed":0.5}
{"Action":"skip","Package":"without/tests"}
`
	fails = `{"Action":"run","Package":"f","Test":"TestB"}
{"Action":"output","Package":"f","Test":"TestB","Output":"got 1, want 2\n"}
{"Action":"fail","Package":"f","Test":"TestB"}
{"Action":"fail","Package":"f","Elapsed":0.5}
`
	skips = `{"Action":"run","Package":"s","Test":"TestC/sub"}
{"Action":"output","Package":"s","Test":"TestC/sub","Output":"    c_test.go:3: needs root\n"}
{"Action":"output","Package":"s","Test":"TestC/sub","Output":"--- SKIP: TestC/sub (0.00s)\n"}
{"Action":"skip","Package":"s","Test":"TestC/sub"}
{"Action":"pass","Package":"s"}
`
	crashes = `{"Action":"run","Package":"c","Test":"TestD"}
{"Action":"output","Package":"c","Test":"TestD","Output":"panic: test timed out after 1s\n"}
{"Action":"output","Package":"c","Output":"FAIL\tc\t1.005s\n"}
{"Action":"fail","Package":"c"}
`
	leaks = `{"Action":"run","Package":"l","Test":"TestE"}
{"Action":"pass","Package":"l","Test":"TestE"}
{"Action":"output","Package":"l","Output":"found unexpected goroutines\n"}
{"Action":"fail","Package":"l"}
`
	unbuilt = `{"ImportPath":"u.test","Action":"build-output","Output":"u_test.go:2:13: expected ')'\n"}
{"ImportPath":"u.test","Action":"build-fail"}
{"Action":"output","Package":"u","Output":"FAIL\tu [setup failed]\n"}
{"Action":"fail","Package":"u","FailedBuild":"u.test"}
`
	benchmarks = `{"Action":"run","Package":"b","Test":"BenchmarkF"}
{"Action":"output","Package":"b","Test":"BenchmarkF","Output":"BenchmarkF-2 1 160 ns/op\n"}
{"Action":"pass","Package":"b"}
`
)

func TestSummary(t *testing.T) {
	for name, test := range map[string]struct {
		events   string
		required bool
		wantErr  string
		want     []string
	}{
		"all pass":           {passes, true, "", []string{"p TestA: a_test.go:7: 20 seeds from 4711;", "\n1 passed, 0 failed, 0 skipped\n"}},
		"one fails":          {passes + fails, true, "failed", []string{"fail f 0.5s\n", "got 1, want 2\n", "\n1 passed, 1 failed, 0 skipped\n"}},
		"skip not required":  {passes + skips, false, "", []string{"1 passed, 0 failed, 1 skipped\n"}},
		"skip required":      {passes + skips, true, "skipped", []string{"TestC/sub", "needs root", "1 passed, 0 failed, 1 skipped\n"}},
		"crash or timeout":   {passes + crashes, false, "failed", []string{"panic: test timed out", "1 passed, 1 failed, 0 skipped\n"}},
		"fails beside tests": {leaks, false, "failed", []string{"unexpected goroutines", "1 passed, 1 failed, 0 skipped\n"}},
		"does not compile":   {passes + unbuilt, false, "failed", []string{"expected ')'", "1 passed, 1 failed, 0 skipped\n"}},
		"benchmarks":         {benchmarks, true, "", []string{"1 passed, 0 failed, 0 skipped\n"}},
		"not JSON":           {passes + "go: no such tool\n", false, "", []string{"go: no such tool\n"}},
		"slowest":            {passes, true, "", []string{"\nslowest tests:\n     1.2s p TestA\n"}},
		"nothing ran":        {"", false, "no test", []string{"0 passed, 0 failed, 0 skipped\n"}},
	} {
		t.Run(name, func(t *testing.T) {
			out, err := Summary([]byte(test.events), test.required)
			if got := fmt.Sprint(err); (err == nil) != (test.wantErr == "") || !strings.Contains(got, test.wantErr) {
				t.Errorf("got the error %q, want one with %q", got, test.wantErr)
			}
			for _, want := range test.want {
				if !strings.Contains(out, want) {
					t.Errorf("output lacks %q:\n%s", want, out)
				}
			}
			if strings.Contains(out, "chatter") {
				t.Errorf("the output of a test that passed is printed:\n%s", out)
			}
		})
	}
}
