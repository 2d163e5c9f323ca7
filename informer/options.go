package informer

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/go-logr/logr"
	"github.com/go-logr/zapr"
	"go.uber.org/zap"
	"k8s.io/client-go/dynamic"
)

// Options says what to watch, and for whom.
type Options struct {
	// NodeName is the name of the Node to follow: its addresses, zone and pod
	// ranges. Empty follows none, and leaves what the Provider's Config says. Space
	// around it and upper case do not matter: names of Nodes have neither.
	NodeName string
	// ServiceProxyName is the value of changetracker.LabelServiceProxyName that
	// Services must carry, the same as in the Provider's Tracker options. Empty means
	// Services without the label. Bind leaves the choice to the Provider.
	ServiceProxyName string
	// Resync is how often Run delivers every object again. 0 means 15m, Never never.
	// With Bind it is the factory's.
	Resync time.Duration
	// ServiceImports, if set, is a client to watch the ServiceImports of the Multi-Cluster
	// Services API with (KEP-1645, multicluster.x-k8s.io/v1alpha1). The Provider gets each as a Service with the
	// name of changetracker.ImportedService and the clusterset IPs as ClusterIPs; its
	// endpoints are the imported EndpointSlices. Types Headless are not proxied. An API
	// server without the resource is no error: it is looked for again each minute.
	// Set changetracker.Options.Cluster too, or no endpoint of theirs is local.
	ServiceImports dynamic.Interface
	// WaitTimeout is how long the first sync waits for the Node, the ServiceCIDRs and the
	// ServiceImports once Services and EndpointSlices have arrived: an old API server has
	// no ServiceCIDRs, and a Node may not exist yet. 0 means 5s.
	WaitTimeout time.Duration
	// Link is the one that Run's client is attached to, if there is one. Run leaves
	// it to the Link to say that the API server does not answer.
	Link *Link
	// Logger gets what an operator should know, and what client-go says of Run's
	// informers under the name client-go; nil is silent.
	Logger *zap.Logger
}

// Never as Options.Resync turns resyncs off.
const Never time.Duration = -1

const (
	defaultResync      = 15 * time.Minute // kube-proxy's --config-sync-period
	defaultWaitTimeout = 5 * time.Second
)

func (o Options) withDefaults() Options {
	o.Resync = cmp.Or(o.Resync, defaultResync)
	o.WaitTimeout = cmp.Or(o.WaitTimeout, defaultWaitTimeout)
	if o.Logger == nil {
		o.Logger = zap.NewNop()
	}
	o.Logger = o.Logger.Named("informer")
	return o
}

func (o Options) validate() error {
	var errs []error
	if o.NodeName != "" && o.nodeName() == "" {
		errs = append(errs, fmt.Errorf("option NodeName: %q is blank", o.NodeName))
	}
	if o.Resync < 0 && o.Resync != Never {
		errs = append(errs, fmt.Errorf("option Resync: %v is negative", o.Resync))
	}
	if o.WaitTimeout < 0 {
		errs = append(errs, fmt.Errorf("option WaitTimeout: %v is negative", o.WaitTimeout))
	}
	return errors.Join(errs...)
}

// nodeName is NodeName as the Node object spells it.
func (o Options) nodeName() string { return strings.ToLower(strings.TrimSpace(o.NodeName)) }

// resync is the period as client-go wants it.
func (o Options) resync() time.Duration { return max(o.Resync, 0) }

// clientLogs has what client-go says in the log. It would log to klog.
func (o Options) clientLogs(ctx context.Context) context.Context {
	return logr.NewContext(ctx, zapr.NewLogger(o.Logger.Named("client-go")))
}
