package nodeproxy_test

import (
	"context"
	"fmt"

	"github.com/spf13/cobra"
	"go.uber.org/zap"
	"k8s.io/client-go/rest"

	"github.com/serviceplane/serviceplane/node/nodeproxy"
)

// An agent hands over the KubeProxyConfiguration that it has, and adds flags of its own. What is wrong is named with its
// line, and nothing has started.
func ExampleRun() {
	configuration := `
apiVersion: kubeproxy.config.k8s.io/v1alpha1
kind: KubeProxyConfiguration
mode: nftables
clusterCIDR: 10.244.0.0/33
`
	err := nodeproxy.Run(context.Background(), nodeproxy.Options{Configuration: []byte(configuration)}, "--master=http://127.0.0.1:6443")
	fmt.Println(err)
	// Output:
	// bad command line:
	// configuration:5: clusterCIDR: --cluster-cidr=10.244.0.0/33: want a range such as 10.244.0.0/16, or one of each IP family separated by a comma
}

// program is what a distribution's node binary has anyway.
type program struct {
	config *rest.Config
	log    *zap.Logger
}

// asAPart is a program with the whole node proxy as a part of it.
func asAPart(ctx context.Context, own program, configuration []byte, agent *cobra.Command) error {
	err := nodeproxy.Run(ctx, nodeproxy.Options{Configuration: configuration, Logger: own.log}, "--master="+own.config.Host)
	agent.AddCommand(nodeproxy.New(nodeproxy.Options{Use: "proxy"}))
	return err
}

var _ = asAPart // compiled for the document only
