package main

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"io"
	"log"
	"maps"
	"math/big"
	"net"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	events "k8s.io/api/events/v1"
	rbac "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/scheme"

	"github.com/serviceplane/serviceplane/internal/apitest"
	"github.com/serviceplane/serviceplane/internal/netns/netnstest"
	"github.com/serviceplane/serviceplane/internal/poll"
)

const (
	apiHost = "192.0.2.1" // the client of a small cluster plays the control plane
	apiPort = "6443"
	token   = "token of system:serviceaccount:kube-system:nodeproxy"
)

// guardedAPI is an API server over TLS that lets one service account do what a
// ClusterRole allows, and remembers what it did.
type guardedAPI struct {
	*apitest.Server

	granted map[string]bool
	ca      []byte // PEM

	mu      sync.Mutex
	used    map[string]bool // guarded by mu
	refused []string        // guarded by mu
	event   *events.Event   // guarded by mu
}

// serveGuarded starts the API server of a cluster. Lists are not streamed, so that
// clients list and watch.
func serveGuarded(t *testing.T, c *small, role *rbac.ClusterRole) *guardedAPI {
	t.Helper()
	a := &guardedAPI{Server: apitest.New(t, apitest.Options{}), granted: grants(t, role), used: map[string]bool{}}
	listener, err := c.client.Listen(t.Context(), "tcp", net.JoinHostPort(apiHost, apiPort))
	netnstest.Check(t, err)
	server := httptest.NewUnstartedServer(a)
	_ = server.Listener.Close() // which it has opened itself
	server.Listener, server.EnableHTTP2 = listener, true
	server.Config.ErrorLog = log.New(io.Discard, "", 0) // some only try whether they reach it
	server.TLS = &tls.Config{Certificates: []tls.Certificate{a.certify(t)}}
	server.StartTLS()
	t.Cleanup(func() {
		server.CloseClientConnections()
		server.Close()
	})
	return a
}

// certify makes a certificate for the API server's address, which is its own authority.
func (a *guardedAPI) certify(t *testing.T) tls.Certificate {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), IPAddresses: []net.IP{net.ParseIP(apiHost)},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageDigitalSignature | x509.KeyUsageCertSign,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	a.ca = pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}
}

// ServeHTTP answers like the server inside, if the client may ask.
func (a *guardedAPI) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	action := actionOf(r)
	if r.Header.Get("Authorization") != "Bearer "+token {
		action += " as somebody else"
	}
	a.mu.Lock()
	if a.granted[action] {
		a.used[action] = true
	} else {
		a.refused = append(a.refused, action)
	}
	a.mu.Unlock()
	if !a.granted[action] {
		http.Error(w, action, http.StatusForbidden)
		return
	}
	if action == createEvent {
		a.takeEvent(w, r)
		return
	}
	a.Server.ServeHTTP(w, r)
}

// createEvent is the only thing that is written.
const createEvent = "create events.k8s.io/events"

// takeEvent remembers an event, which clients send as protobuf.
func (a *guardedAPI) takeEvent(w http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(r.Body)
	if err == nil {
		var object runtime.Object
		object, _, err = scheme.Codecs.UniversalDeserializer().Decode(body, nil, nil)
		a.mu.Lock()
		a.event, _ = object.(*events.Event)
		a.mu.Unlock()
	}
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	w.Header().Set("Content-Type", runtime.ContentTypeProtobuf)
	w.WriteHeader(http.StatusCreated)
	_, _ = w.Write(body) // the client may be gone
}

// expectEvent wants an event Starting on the Node.
func (a *guardedAPI) expectEvent(t *testing.T, node string) {
	t.Helper()
	var got *events.Event
	if !poll.Soon(func() bool {
		a.mu.Lock()
		defer a.mu.Unlock()
		got = a.event
		return got != nil
	}) {
		t.Error("no event was written")
		return
	}
	if got.Reason != "Starting" || got.Type != "Normal" || got.Regarding.Kind != "Node" || got.Regarding.Name != node || got.Namespace != "default" ||
		got.ReportingController == "" || got.ReportingInstance == "" || got.Action == "" || got.EventTime.IsZero() {
		t.Errorf("event %+v, want Starting on the Node %s, with all that events.k8s.io/v1 requires", got, node)
	}
}

// expectLeast wants the ClusterRole to allow what was asked for, and nothing else.
func (a *guardedAPI) expectLeast(t *testing.T) {
	t.Helper()
	a.mu.Lock()
	defer a.mu.Unlock()
	if len(a.refused) > 0 {
		t.Errorf("the ClusterRole lacks %q", a.refused)
	}
	for action := range a.granted {
		if !a.used[action] {
			t.Errorf("the ClusterRole allows to %s, of which no use is made", action)
		}
	}
	if t.Failed() {
		t.Logf("requests were to %q", slices.Sorted(maps.Keys(a.used)))
	}
}

// actionOf is a request as RBAC sees it, such as "watch discovery.k8s.io/endpointslices".
// What is no list of a whole cluster stays as it is, which no rule allows.
func actionOf(r *http.Request) string {
	group, path := "", ""
	if core, ok := strings.CutPrefix(r.URL.Path, "/api/v1/"); ok {
		path = core
	} else if named, ok := strings.CutPrefix(r.URL.Path, "/apis/"); ok {
		group, path, _ = strings.Cut(named, "/")
		_, path, _ = strings.Cut(path, "/") // without the version
	}
	if r.Method == http.MethodPost && group+"/"+path == "events.k8s.io/namespaces/default/events" {
		return createEvent
	}
	if r.Method != http.MethodGet || path == "" || strings.Contains(path, "/") {
		return r.Method + " " + r.URL.Path
	}
	verb := "list"
	if watch := r.URL.Query().Get("watch"); watch == "true" || watch == "1" {
		verb = "watch"
	}
	return verb + " " + group + "/" + path
}

// grants are the actions that a ClusterRole allows.
func grants(t *testing.T, role *rbac.ClusterRole) map[string]bool {
	t.Helper()
	actions := map[string]bool{}
	for _, rule := range role.Rules {
		if len(rule.NonResourceURLs)+len(rule.ResourceNames) > 0 {
			t.Errorf("rule %+v, want one about whole kinds of objects", rule)
		}
		for _, group := range rule.APIGroups {
			for _, resource := range rule.Resources {
				for _, verb := range rule.Verbs {
					actions[verb+" "+group+"/"+resource] = true
				}
			}
		}
	}
	return actions
}
