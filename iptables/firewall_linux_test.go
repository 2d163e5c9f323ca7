package iptables

import (
	"errors"
	"io"
	"net/http"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/internal/lightdeps"
	"github.com/serviceplane/serviceplane/internal/netns/netnstest"
	"github.com/serviceplane/serviceplane/internal/poll"
	"github.com/serviceplane/serviceplane/proxier"
	"github.com/serviceplane/serviceplane/proxiertest"
)

// TestHealthCheckNodePortsBehindAFirewall: with policy DROP at INPUT, load balancers get a
// complete response from health check node ports, over both families.
func TestHealthCheckNodePortsBehindAFirewall(t *testing.T) {
	everyVariant(t, func(t *testing.T, w *world) {
		client := netnstest.New(t)
		netnstest.Connect(t, client, []string{"192.0.2.2/24", "2001:db8::2/64"}, w.ns, []string{"192.0.2.1/24", "2001:db8::1/64"})
		for _, program := range []string{"iptables", "ip6tables"} {
			w.run(program+"-"+string(w.variant), "-P", "INPUT", "DROP")
		}
		w.run("ip6tables-"+string(w.variant), "-A", "INPUT", "-p", "ipv6-icmp", "-j", "ACCEPT") // neighbour discovery
		config := w.config().WithDefaults()
		config.Node = changetracker.Node{Name: "node"}
		deps := lightdeps.Complete(proxier.Deps{}, config.NetNS)
		p, err := lightdeps.Provider(config.Config, deps, func(family v1.IPFamily) (*engine, error) { return newEngine(config, family, deps) })
		if err != nil {
			t.Fatal(err)
		}
		poll.Background(w.t, p.Run)
		p.OnServiceAdd(proxiertest.Service("test", "web", proxiertest.ClusterIPs("10.96.0.1", "fd00:96::1"),
			proxiertest.NodePort("http", v1.ProtocolTCP, 80, 30080), proxiertest.LoadBalancer("198.19.0.1"),
			proxiertest.ExternalPolicyLocal(), func(s *v1.Service) { s.Spec.HealthCheckNodePort = 30999 }))
		p.OnEndpointSliceAdd(slice("web", discovery.AddressTypeIPv4, "10.244.0.2"))
		p.OnServiceSynced()
		p.OnEndpointSlicesSynced()
		w.sync(p)
		c := http.Client{Timeout: 2 * time.Second, Transport: &http.Transport{DialContext: client.Dial, DisableKeepAlives: true}}
		for _, node := range []string{"192.0.2.1", "[2001:db8::1]"} {
			// The server starts after the sync.
			poll.Nil(t, "health check node port of "+node, func() error { return askHealth(&c, node) })
		}
	})
}

func askHealth(c *http.Client, node string) error {
	answer, err := c.Get("http://" + node + ":30999/")
	if err != nil {
		return err
	}
	_, err = io.Copy(io.Discard, answer.Body)
	return errors.Join(err, answer.Body.Close())
}
