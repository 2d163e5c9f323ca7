package debughttp_test

import (
	"bufio"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/serviceplane/serviceplane/node/debughttp"
)

// ask sends a request over a socket, as other clients do, and returns the status.
func ask(t *testing.T, server *httptest.Server, request string) int {
	t.Helper()
	conn, err := net.Dial("tcp", server.Listener.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if _, err := fmt.Fprint(conn, request); err != nil {
		t.Fatal(err)
	}
	answer, err := http.ReadResponse(bufio.NewReader(conn), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer answer.Body.Close()
	return answer.StatusCode
}

// A request with another host name comes from another site's page.
func TestHosts(t *testing.T) {
	guarded := debughttp.KnownHosts(http.NotFoundHandler(), "Node-1.example.", "proxy.example:8080")
	for name, c := range map[string]struct {
		handler http.Handler
		fine    int
	}{
		"KnownHosts": {guarded, http.StatusNotFound},
		"Handler":    {debughttp.Handler(&fakeSource{}, debughttp.Hosts("node-1.example", "proxy.example")), http.StatusOK},
	} {
		t.Run(name, func(t *testing.T) {
			server := httptest.NewServer(c.handler)
			defer server.Close()
			for host, known := range map[string]bool{
				"127.0.0.1": true, "127.0.0.1:10249": true, "192.0.2.7": true, "192.0.2.7:1": true, "127.0.0.1:": true,
				"[::1]": true, "[::1]:10249": true, "[2001:DB8::1]:80": true, "[fe80::1%25eth0]:80": true, "[::ffff:192.0.2.1]": true,
				"localhost": true, "localhost:10249": true, "LocalHost:80": true, "localhost.": true, "localhost.:80": true,
				"node-1.example": true, "NODE-1.example:443": true, "node-1.example.": true, "proxy.example": true, "proxy.example:1": true,
				"evil.example": false, "evil.example:10249": false, "localhost.evil.example": false, "evil.localhost": false,
				"127.0.0.1.evil.example": false, "127.0.0.1.nip.io:10249": false, "node-1.example.evil": false, "xnode-1.example": false,
				"127.1": false, "2130706433": false, "0x7f000001": false, "*": false, ".": false, "localhost..": false, "[evil.example]": false,
			} {
				got := ask(t, server, "GET / HTTP/1.1\r\nHost: "+host+"\r\nConnection: close\r\n\r\n")
				want := http.StatusMisdirectedRequest
				if known {
					want = c.fine
				}
				if got != want {
					t.Errorf("Host %s: %d, want %d", host, got, want)
				}
			}
			for request, want := range map[string]int{
				"GET / HTTP/1.0\r\n\r\n":                                                            c.fine, // has none
				"GET / HTTP/1.0\r\nHost: evil.example\r\n\r\n":                                      http.StatusMisdirectedRequest,
				"GET / HTTP/1.1\r\nHost:\r\nConnection: close\r\n\r\n":                              c.fine,
				"GET http://evil.example/ HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n": http.StatusMisdirectedRequest,
			} {
				if got := ask(t, server, request); got != want {
					t.Errorf("%q: %d, want %d", request, got, want)
				}
			}
		})
	}
}

func TestAnyHostAllowsAll(t *testing.T) {
	w := httptest.NewRecorder()
	debughttp.KnownHosts(http.NotFoundHandler(), debughttp.AnyHost).ServeHTTP(w, httptest.NewRequest(http.MethodGet, "http://evil.example/", nil))
	if w.Code != http.StatusNotFound {
		t.Errorf("code %d, want 404 of what is behind", w.Code)
	}
}

// A request with a foreign host gets only the reason.
func TestAForeignHostIsToldWhy(t *testing.T) {
	a := get(t, debughttp.Handler(&fakeSource{}), "http://evil.example/status", http.StatusMisdirectedRequest)
	if text, _ := at(t, a, "error").(string); !strings.Contains(text, `host "evil.example": want an IP address, localhost or`) || len(a) != 1 {
		t.Errorf("answer %v, want an error that names the host", a)
	}
}
