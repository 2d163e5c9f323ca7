package proxiertest

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"strconv"
	"syscall"
	"testing"

	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/internal/poll"
)

// checkedPort is a health check node port that no other test uses.
const checkedPort = 32610

// refusedCheck is the result of a check without a listener.
const refusedCheck = "refused"

// loadBalancerScenarios are about the answers of health check node ports.
func loadBalancerScenarios() []scenario {
	return []scenario{{
		name: "PKT-50/load_balancer", needs: "Health",
		rule:     "Under externalTrafficPolicy Local, a health check node port answers 200 with ready local endpoints, otherwise 503; under Cluster it is closed.",
		services: []service{checked(ExternalPolicyLocal())},
		play:     playHealthChecks,
	}, {
		name: "PKT-50/service_of_one_family", needs: "Health", setup: setupPrimary,
		rule:     "A health check node port answers at every address that accepts node ports, whatever the IP families of the Service.",
		services: []service{checked(ExternalPolicyLocal())},
		play:     playChecksOfOneFamily,
	}}
}

// checked is a service with a health check node port.
func checked(policy ServiceOption, endpoints ...endpoint) service {
	port := func(s *v1.Service) { s.Spec.HealthCheckNodePort = checkedPort }
	return service{external: true, options: []ServiceOption{policy, port}, endpoints: endpoints}
}

func playHealthChecks(ctx context.Context, t *testing.T, s *stage) {
	t.Helper()
	local, cluster := ExternalPolicyLocal(), func(*v1.Service) {}
	s.check(ctx, t, []checkStep{
		{"no_endpoints", checked(local), "503"},
		{"endpoint_elsewhere", checked(local, ready(remote0)...), "503"},
		{"endpoint_here", checked(local, ready(remote0, pod1)...), "200"},
		{"endpoint_here_terminates", checked(local, terminating(pod1)...), "503"},
		{"back_again", checked(local, ready(pod1)...), "200"},
		{"policy_cluster", checked(cluster, ready(pod1)...), refusedCheck},
	})
}

func playChecksOfOneFamily(ctx context.Context, t *testing.T, s *stage) {
	t.Helper()
	local := ExternalPolicyLocal()
	only := func(keep v1.IPFamily, endpoints ...endpoint) service {
		spec := checked(local, endpoints...)
		spec.options = append(spec.options, onlyFamily(keep))
		return spec
	}
	s.check(ctx, t, []checkStep{
		{"IPv4_only", only(v1.IPv4Protocol, ready(pod1)...), "200"},
		{"IPv4_only_endpoint_elsewhere", only(v1.IPv4Protocol, ready(remote0)...), "503"},
		{"IPv6_only", only(v1.IPv6Protocol, ready(pod1)...), "200"},
		{"both", checked(local, ready(pod1)...), "200"},
		{"policy_cluster", checked(func(*v1.Service) {}, ready(pod1)...), refusedCheck},
	})
}

// onlyFamily removes the cluster IPs of the other family.
func onlyFamily(keep v1.IPFamily) ServiceOption {
	return func(s *v1.Service) {
		i := slices.Index(s.Spec.IPFamilies, keep)
		s.Spec.ClusterIP, s.Spec.ClusterIPs, s.Spec.IPFamilies = s.Spec.ClusterIPs[i], s.Spec.ClusterIPs[i:i+1], []v1.IPFamily{keep}
	}
}

// checkStep is a version of a service, and the answer at both of the node's main addresses.
type checkStep struct {
	name    string
	service service
	want    string
}

func (s *stage) check(ctx context.Context, t *testing.T, steps []checkStep) {
	t.Helper()
	for _, step := range steps {
		s.publish(ctx, t, step.service)
		for _, family := range families() {
			from, to := s.sender(client, family), netip.AddrPortFrom(s.world.Node.Addr(family), checkedPort)
			ok := t.Run(string(family)+"/"+step.name, func(t *testing.T) {
				if got := awaitCheck(ctx, from, to, step.want); got != step.want {
					t.Errorf("%v answers %s, want %s", to, got, step.want)
				}
			})
			if !ok {
				return // the others may take as long
			}
		}
	}
}

// awaitCheck repeats the check until the answer is the wanted one, or poll.Timeout passes:
// the listener receives a change after the sync.
func awaitCheck(ctx context.Context, from sender, to netip.AddrPort, want string) (got string) {
	poll.Soon(func() bool {
		got = check(ctx, from, to)
		return got == want || ctx.Err() != nil
	})
	return got
}

// check sends one request, and returns the status of the answer.
func check(ctx context.Context, from sender, to netip.AddrPort) string {
	dial := func(ctx context.Context, network, address string) (net.Conn, error) {
		return from.host.ns.DialFrom(ctx, network, from.addr, address)
	}
	client := http.Client{Timeout: answerTimeout, Transport: &http.Transport{DisableKeepAlives: true, DialContext: dial}}
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, fmt.Sprintf("http://%v/", to), http.NoBody)
	if err != nil {
		return err.Error()
	}
	answer, err := client.Do(request)
	switch {
	case errors.Is(err, syscall.ECONNREFUSED):
		return refusedCheck
	case err != nil:
		return err.Error()
	}
	_ = answer.Body.Close()
	return strconv.Itoa(answer.StatusCode)
}
