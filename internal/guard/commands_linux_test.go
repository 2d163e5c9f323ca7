package guard

import (
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"

	"github.com/serviceplane/serviceplane/internal/guard/documents"
	"github.com/serviceplane/serviceplane/internal/netns/netnstest"
)

// elsewhere are commands that other tests run, or that need a cluster.
var elsewhere = regexp.MustCompile(`(?m)^([A-Z_]+=\S+ )*(\./hack/|hack/|make |go (get|test) |.*\$KUBECONFIG).*\n`) // read-only

// isolate makes the repository read-only, /run empty, and files of those kernel settings
// that are not per network namespace. It interrupts programs that run for 30 s.
const isolate = `set -eu
mount --bind . .
cd "$PWD"
mount -o remount,bind,ro .
mount -t tmpfs tmpfs /run
for setting in /proc/sys/net/netfilter/nf_conntrack_max /sys/module/nf_conntrack/parameters/hashsize; do
  [ ! -e "$setting" ] || { cat "$setting" >/run/setting; cp /run/setting "/run/$(basename "$setting")"; mount --bind "/run/$(basename "$setting")" "$setting"; }
done
export GOFLAGS="${GOFLAGS:-} -buildvcs=false" GOBIN="$TMPDIR/bin"
go() {
  [ "$1" = run ] || { command go "$@"; return; }
  command go build -o "$TMPDIR/program" "$2"
  shift 2
  timeout --preserve-status --signal=INT 30 "$TMPDIR/program" "$@"
}
`

// TestCommands runs each block of sh in the documents from the root of the repository,
// in network and mount namespaces.
func TestCommands(t *testing.T) {
	t.Parallel()
	for name, text := range documents.Read(t, root, ".md") {
		for _, block := range fenced.FindAllStringSubmatch(text, -1) {
			script := elsewhere.ReplaceAllString(block[2], "")
			if block[1] != "sh" || strings.TrimSpace(script) == "" {
				continue
			}
			t.Run(name, func(t *testing.T) {
				t.Parallel()
				command := exec.CommandContext(t.Context(), "sh", "-c", isolate+script)
				command.Dir, command.Env = filepath.Clean(root), append(command.Environ(), "TMPDIR="+t.TempDir())
				command.SysProcAttr = &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNS}
				var out strings.Builder
				command.Stdout, command.Stderr = &out, &out
				netnstest.Check(t, netnstest.New(t).Do(command.Start))
				if err := command.Wait(); err != nil {
					t.Errorf("%s\n%v, want success; output:\n%s", script, err, &out)
				}
			})
		}
	}
}
