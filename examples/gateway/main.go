// Gateway is a Gateway API controller and its data plane in one program, for TCPRoutes and
// UDPRoutes: the kernel forwards connections from the listeners of Gateways to the endpoints of
// Services, in proportion to the weights of backendRefs.
package main

import (
	"context"
	"flag"
	"fmt"
	"net/netip"
	"os"
	"os/signal"
	"strings"

	"go.uber.org/zap"
	"k8s.io/client-go/tools/clientcmd"
	gw "sigs.k8s.io/gateway-api/apis/v1"

	"github.com/serviceplane/serviceplane/proxier"
)

func main() {
	kubeconfig := flag.String("kubeconfig", "", "kubeconfig file; without it, the service account of the pod")
	name := flag.String("controller-name", "serviceplane.example/gateway", "controllerName of the GatewayClasses of this program")
	addresses := flag.String("addresses", "", "prefixes of the addresses of Gateways, such as 203.0.113.0/28,2001:db8::/64; route them to this node")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if err := start(ctx, *kubeconfig, *name, *addresses); err != nil {
		fmt.Fprintln(os.Stderr, "gateway:", err)
		stop()
		os.Exit(1)
	}
}

func start(ctx context.Context, kubeconfig, name, addresses string) error {
	log, err := zap.NewProduction()
	if err != nil {
		return err
	}
	pool, err := parsePool(addresses)
	if err != nil {
		return err
	}
	client, err := clientcmd.BuildConfigFromFlags("", kubeconfig)
	if err != nil {
		return err
	}
	refusing, release, err := reserve(pool)
	if err != nil {
		return err
	}
	defer release()
	return run(ctx, client, settings{controller: gw.GatewayController(name), pool: pool, refusing: refusing}, proxier.Config{}, log)
}

// parsePool parses prefixes, separated by commas.
func parsePool(text string) (pool []netip.Prefix, err error) {
	for field := range strings.SplitSeq(text, ",") {
		prefix, err := netip.ParsePrefix(strings.TrimSpace(field))
		if err != nil {
			return nil, fmt.Errorf("-addresses: %w", err)
		}
		pool = append(pool, prefix)
	}
	return pool, nil
}
