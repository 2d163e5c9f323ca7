package nodeproxy

import (
	"context"
	"errors"
	"fmt"
	"os"

	"go.uber.org/zap"
	"go.yaml.in/yaml/v3"

	"github.com/serviceplane/serviceplane/conntrack"
)

// writeConfig writes the configuration that the flags and the file make, for --config.
func (o *options) writeConfig() error {
	text, err := o.kubeProxyConfiguration().yaml()
	if err != nil {
		return fmt.Errorf("write configuration: %w", err)
	}
	if err := os.WriteFile(o.kubeProxy.writeConfigTo, text, 0o644); err != nil { //nolint:gosec // it has no secrets, and kube-proxy's file is readable too
		return fmt.Errorf("write configuration: %w", err)
	}
	return nil
}

// sysctls returns the kernel settings of the flags.
func (o *options) sysctls(instance string, log *zap.Logger) (*conntrack.Sysctls, error) {
	wanted := o.conntrack
	wanted.Accounting = o.countTraffic && o.mode() != modeUserspace // whose sockets count
	wanted.StateDir, wanted.Instance, wanted.Logger = o.stateDir, instance, log
	return conntrack.NewSysctls(wanted)
}

// initialize changes the kernel settings that a container with CAP_NET_ADMIN alone
// cannot change. Its error names those that stay.
func (o *options) initialize(ctx context.Context, instance string, log *zap.Logger) error {
	settings, err := o.sysctls(instance, log)
	if err != nil {
		return err
	}
	var errs []error
	for _, c := range settings.Apply(ctx) {
		errs = append(errs, fmt.Errorf("change kernel settings: %s", c.Message))
	}
	if len(errs) == 0 {
		log.Info("the kernel settings are in place")
	}
	return errors.Join(errs...)
}

// yaml returns the configuration as YAML. Its fields have the names of JSON.
func (c *kubeProxyConfiguration) yaml() ([]byte, error) {
	text, err := c.json()
	if err != nil {
		return nil, err
	}
	var document yaml.Node // keeps the order of the fields, and JSON is YAML
	if err := yaml.Unmarshal(text, &document); err != nil {
		return nil, err
	}
	block(&document)
	return yaml.Marshal(&document)
}

// block makes a document readable: no braces, no quotes that are not needed.
func block(n *yaml.Node) {
	n.Style = 0
	for _, inner := range n.Content {
		block(inner)
	}
}
