//! mTLS of the control plane (XFER-10): both sides show a certificate of the configured authority.

use tonic::transport::{Certificate, ClientTlsConfig, Identity, Server, ServerTlsConfig};

use crate::{Config, StartError, config::Tls};

/// `None` without certificates.
pub(crate) fn server_tls(config: &Config) -> Result<Option<ServerTlsConfig>, StartError> {
    let Some(tls) = &config.tls else { return Ok(None) };
    let server = ServerTlsConfig::new()
        .identity(identity(tls))
        .client_ca_root(Certificate::from_pem(&tls.ca))
        .client_auth_optional(false)
        .timeout(super::stream::HANDSHAKE);
    // Certificate and key are parsed here, so that a mistake stops the start.
    Server::builder()
        .tls_config(server.clone())
        .map_err(|e| StartError::Tls {
            fault: super::status::chain(&e),
        })?;
    Ok(Some(server))
}

pub(super) fn client_tls(config: &Config) -> Option<ClientTlsConfig> {
    let tls = config.tls.as_ref()?;
    let client = ClientTlsConfig::new()
        .identity(identity(tls))
        .ca_certificate(Certificate::from_pem(&tls.ca));
    Some(match &tls.name {
        Some(name) => client.domain_name(name),
        None => client,
    })
}

fn identity(tls: &Tls) -> Identity {
    Identity::from_pem(&tls.cert, &tls.key)
}
