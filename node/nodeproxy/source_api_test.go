package nodeproxy

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"go.uber.org/zap"
)

const kubeconfig = `apiVersion: v1
kind: Config
clusters: [{name: c, cluster: {server: "https://192.0.2.1:6443"}}]
contexts: [{name: c, context: {cluster: c}}]
current-context: c
`

func TestTheAddressOfTheAPIServer(t *testing.T) {
	file := filepath.Join(t.TempDir(), "kubeconfig")
	if err := os.WriteFile(file, []byte(kubeconfig), 0o600); err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		args []string
		want string
		at   string
	}{
		"kubeconfig":            {[]string{"--kubeconfig", file}, "https://192.0.2.1:6443", "[192.0.2.1:6443]"},
		"master":                {[]string{"--master=http://192.0.2.2:8080"}, "http://192.0.2.2:8080", "[192.0.2.2:8080]"},
		"master over the other": {[]string{"--kubeconfig", file, "--master=https://192.0.2.2"}, "https://192.0.2.2", "[192.0.2.2:443]"},
		"an IPv6 address":       {[]string{"--master=https://[2001:db8::1]:6443"}, "https://[2001:db8::1]:6443", "[[2001:db8::1]:6443]"},
		"without a scheme":      {[]string{"--master=192.0.2.2"}, "192.0.2.2", "[192.0.2.2:80]"},
		"no such name":          {[]string{"--master=https://no-such-name.invalid"}, "https://no-such-name.invalid", "[]"},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := parse(t, c.args...).restConfig()
			if err != nil {
				t.Fatalf("restConfig: %v", err)
			}
			if got.Host != c.want {
				t.Errorf("host %q, want %q", got.Host, c.want)
			}
			if at := fmt.Sprint(parse(t, c.args...).apiServer(t.Context(), zap.NewNop())); at != c.at {
				t.Errorf("the API server is at %s, want %s", at, c.at)
			}
			const accepted = "application/vnd.kubernetes.protobuf,application/json"
			if got.ContentType != "application/vnd.kubernetes.protobuf" || got.AcceptContentTypes != accepted { // OPT-15
				t.Errorf("content type %q, accepted %q, want protobuf, or JSON", got.ContentType, got.AcceptContentTypes)
			}
		})
	}
	if _, err := parse(t, "--kubeconfig=/not/there").restConfig(); err == nil || !strings.Contains(err.Error(), "/not/there") {
		t.Errorf("restConfig = %v, want an error that names the file", err)
	}
}
