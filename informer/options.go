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
)

// Options are the options of Bind and Run.
type Options struct {
	// NodeName is the name of the Node whose addresses, zone and pod CIDRs the Provider
	// gets. If it is empty, those of the Provider's Config stay. It is trimmed and
	// converted to lower case. Bind also needs Informers.Nodes.
	NodeName string
	// ServiceProxyName is the value of changetracker.LabelServiceProxyName that
	// Services must carry, the same as in the Provider's Tracker options. Empty means
	// Services without the label. Bind ignores it: the Provider filters then.
	ServiceProxyName string
	// ServiceImports makes Run watch ServiceImports too. Set changetracker.Options.Cluster,
	// so that imported endpoints on this node count as local. Bind has
	// Informers.ServiceImports.
	ServiceImports bool
	// WaitTimeout is how long the first sync waits for the Node, the ServiceCIDRs and the
	// ServiceImports, after Services and EndpointSlices have arrived: a Node may not exist yet.
	// Run does not wait for what the API server does not have, or forbids. 0 means 5s.
	WaitTimeout time.Duration
	// Link is the Link that Run's configuration is attached to, if any. Run then does not
	// log that the API server does not answer.
	Link *Link
	// Logger receives log lines for operators, and with Run also those of client-go, under
	// the name client-go; nil is silent.
	Logger *zap.Logger
}

// NoHeaderTimeout disables LinkOptions.HeaderTimeout.
const NoHeaderTimeout time.Duration = -1

const defaultWaitTimeout = 5 * time.Second

func (o Options) withDefaults() Options {
	o.WaitTimeout = cmp.Or(o.WaitTimeout, defaultWaitTimeout)
	o.Logger = cmp.Or(o.Logger, zap.NewNop())
	o.Logger = o.Logger.Named("informer")
	return o
}

func (o Options) validate() error {
	var errs []error
	if o.NodeName != "" && o.nodeName() == "" {
		errs = append(errs, fmt.Errorf("option NodeName: %q is blank", o.NodeName))
	}
	if o.WaitTimeout < 0 {
		errs = append(errs, fmt.Errorf("option WaitTimeout: %v is negative", o.WaitTimeout))
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("informer options: %w", err)
	}
	return nil
}

// nodeName returns the name of the Node object.
func (o Options) nodeName() string { return strings.ToLower(strings.TrimSpace(o.NodeName)) }

// clientLogs makes client-go log to o.Logger instead of klog.
func (o Options) clientLogs(ctx context.Context) context.Context {
	return logr.NewContext(ctx, zapr.NewLogger(o.Logger.Named("client-go")))
}
