package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/fstest"
)

// What go test -json prints, without times and output.
const (
	passes = `{"Action":"run","Package":"m/nftables","Test":"TestPackets"}
{"Action":"run","Package":"m/nftables","Test":"TestPackets/PKT-01"}
{"Action":"run","Package":"m/nftables","Test":"TestPackets/PKT-01/IPv4/TCP/pod"}
{"Action":"pass","Package":"m/nftables","Test":"TestPackets/PKT-01/IPv4/TCP/pod"}
{"Action":"pass","Package":"m/nftables","Test":"TestPackets/PKT-01"}
{"Action":"pass","Package":"m/nftables","Test":"TestPackets/PKT-80"}
{"Action":"pass","Package":"m/nftables","Test":"TestPackets"}
{"Action":"pass","Package":"m/nftables","Test":"TestOther"}
{"Action":"pass","Package":"m/nftables"}
`
	fails = `{"Action":"fail","Package":"m/ipvs","Test":"TestPackets/PKT-01"}
{"Action":"skip","Package":"m/ipvs","Test":"TestAffinityEndsAfterItsTimeout/PKT-60/timeout"}
`
	crashes = `{"Action":"run","Package":"m/iptables","Test":"TestPacketsWithLegacy/PKT-01"}
panic: out of memory
{"Action":"fail","Package":"m/iptables"}
`
)

func TestTable(t *testing.T) {
	for name, test := range map[string]struct{ events, wantErr, want string }{
		"all pass":    {passes, "", "| 5.10 | 2 / 0 / 0 | – | – | – | – | – | – |\n"},
		"some do not": {passes + fails, "failed or were skipped", "| 5.10 | 2 / 0 / 0 | – | – | – | 0 / 1 / 1 | – | – |\n"},
		"crash":       {passes + crashes, "failed", "| 5.10 | 2 / 0 / 0 | – | 0 / 1 / 0 | – | – | – | – |\n"},
		"nothing ran": {"", "no check passed", "| 5.10 | – | – | – | – | – | – | – |\n"},
	} {
		t.Run(name, func(t *testing.T) {
			folder := filepath.Join(t.TempDir(), "5.10")
			if err := os.CopyFS(folder, fstest.MapFS{"1": {Data: []byte(test.events)}}); err != nil {
				t.Fatal(err)
			}
			var out strings.Builder
			err := run([]string{folder}, &out)
			if got := fmt.Sprint(err); (err == nil) != (test.wantErr == "") || !strings.Contains(got, test.wantErr) {
				t.Errorf("got the error %q, want one with %q", got, test.wantErr)
			}
			if !strings.HasSuffix(out.String(), test.want) {
				t.Errorf("got the table\n%swant it to end in\n%s", out.String(), test.want)
			}
		})
	}
}
